-- filter_hits: a filter that found something in the rollouts of a step, or decided against one
select
    run,  -- run that uses the rollouts
    step,  -- their step
    filter,  -- name of the filter
    count(*) filter (where is_found) as num_found,  -- rollouts that it found something on
    count(*) filter (where not is_found) as num_decided  -- rollouts that it left out
from (
    select run, step, unnest(detected) as filter, true as is_found from rollouts
    union all
    select run, step, reason, false from rollouts where reason is not null
)
group by run, step, filter

-- identical_replies: how often the replies of a training step repeat
select
    run,  -- run that uses the rollouts
    step,  -- training step
    coalesce(sum(copies) filter (where copies > 1), 0) / sum(copies) as share  -- replies that another to the same example equals, 0 to 1
from (
    select run, step, environment, example_id, reply, count(*) as copies
    from rollouts
    where for_training and reply is not null
    group by all
)
group by run, step

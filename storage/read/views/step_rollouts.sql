-- step_rollouts: what the rollouts of a step say together; means are over those that were not stopped
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    for_training,  -- false of rollouts that score a policy
    count(*) as num_traces,  -- rollouts
    count(distinct group_id) as num_groups,  -- groups
    count(distinct (environment, example_id)) as num_examples,  -- examples
    count(keep) as num_judged,  -- rollouts that the filters have judged
    case when count(keep) > 0 then count(*) filter (where keep) end as num_kept,  -- rollouts that the filters keep; null before they have judged
    case when count(trained) = count(*) then count(*) filter (where trained) end as num_trained,  -- rollouts that were trained on; null where that is no longer known
    sum(num_tokens)::bigint as tokens,  -- tokens read and sampled
    avg(num_input_tokens) filter (where outcome not in ('stopped', 'stale')) as num_input_tokens,  -- mean tokens read
    avg(num_output_tokens) filter (where outcome not in ('stopped', 'stale')) as num_output_tokens,  -- mean tokens sampled
    avg(num_turns) filter (where outcome not in ('stopped', 'stale')) as num_turns,  -- mean sampled messages
    avg(is_truncated::int) filter (where outcome not in ('stopped', 'stale')) as truncated,  -- share that was cut off, 0 to 1
    avg(staleness) filter (where outcome not in ('stopped', 'stale')) as staleness_mean,  -- mean steps since the policy that sampled
    max(staleness) filter (where outcome not in ('stopped', 'stale')) as staleness_max,  -- most steps since the policy that sampled
    avg(seconds order by key, trace_id) filter (where outcome not in ('stopped', 'stale')) as seconds  -- mean wall-clock of set-up, generation and scoring
from rollouts
group by all

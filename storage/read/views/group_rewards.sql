-- group_rewards: a group of rollouts of one example, as a run uses it
select
    run,  -- run that uses the rollouts
    key,  -- work that made their traces
    group_id,  -- group
    count(*) as num_rollouts,  -- rollouts
    count(reward) as num_rewarded,  -- rollouts that were scored
    count(*) filter (where error_class not in ('straggler', 'stale')) as num_errored,  -- rollouts that failed
    count(*) filter (where error_class in ('straggler', 'stale')) as num_stopped,  -- rollouts that were stopped, which did not fail
    min(reward) as lowest,  -- least reward
    avg(reward order by trace_id) as mean,  -- mean reward
    max(reward) filter (where not isnan(reward)) as highest  -- greatest reward that is a number
from rollouts
group by run, key, group_id

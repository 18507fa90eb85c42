-- groups: the rollouts of one agent in a group of a step
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    group_id,  -- group
    agent,  -- agent's seat, since agents earn different things
    any_value(environment) as environment,  -- environment
    any_value(example_id) as example_id,  -- example that all of them tried
    count(*) as num_traces,  -- rollouts
    count(reward) filter (where outcome not in ('stopped', 'stale')) as num_scored,  -- rollouts that were scored and not stopped, of which the rewards are
    avg(reward order by trace_id) filter (where outcome not in ('stopped', 'stale')) as reward_mean,  -- mean reward
    stddev_pop(reward order by trace_id) filter (where outcome not in ('stopped', 'stale')) as reward_spread,  -- standard deviation of the whole group, and no sample of more
    min(reward) filter (where outcome not in ('stopped', 'stale')) as reward_min,  -- least reward
    max(reward) filter (where outcome not in ('stopped', 'stale') and not isnan(reward)) as reward_max,  -- greatest reward that is a number
    case when count(distinct baseline) = 1 then any_value(baseline) end as baseline,  -- what was subtracted from the rewards; null without one, or where members have several, as leaving one out gives
    case when count(keep) > 0 then count(*) filter (where keep) end as num_kept,  -- rollouts that the filters keep; null before they have judged
    case when count(trained) = count(*) then count(*) filter (where trained) end as num_trained,  -- rollouts that were trained on; null where that is no longer known
    count(*) filter (where outcome = 'filtered') as num_filtered,  -- rollouts that a filter left out
    count(*) filter (where outcome = 'errored') as num_errored,  -- rollouts that failed
    count(*) filter (where outcome in ('stopped', 'stale')) as num_stopped  -- rollouts that were stopped
from rollouts
group by run, step, group_id, agent

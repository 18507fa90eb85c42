-- step_rewards: rewards of a step, of one of its environments, or of one agent in that; stopped rollouts are not counted
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    for_training,  -- false of rollouts that score a policy
    environment,  -- environment; null for all of the step
    agent,  -- agent's seat; null for all of the environment
    count(*) as num_traces,  -- rollouts
    count(reward) as num_scored,  -- rollouts that were scored, of which the rewards are
    avg(reward order by key, trace_id) as mean,  -- mean reward
    stddev_pop(reward order by key, trace_id) as spread,  -- standard deviation of all, and no sample of more
    min(reward) as min,  -- least reward
    max(reward) filter (where not isnan(reward)) as max  -- greatest reward that is a number
from rollouts
where outcome not in ('stopped', 'stale')
group by grouping sets (
    (run, step, for_training), (run, step, for_training, environment), (run, step, for_training, environment, agent)
)

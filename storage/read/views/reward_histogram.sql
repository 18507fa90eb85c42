-- reward_histogram: one of 20 equal bins of an environment's rewards in a step; the last bin includes its upper end
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    for_training,  -- false of rollouts that score a policy
    environment,  -- environment
    low,  -- lower end of the first bin
    high,  -- upper end of the last bin
    least(greatest(floor((reward - low) / (high - low) * 20), 0), 19)::int as bin,  -- number of the bin, from 0
    count(*) as num_traces  -- rollouts with such a reward; rewards that are not finite are in no bin
from rollouts
join reward_scales using (run, step, for_training, environment)
where outcome not in ('stopped', 'stale') and isfinite(reward)
group by all

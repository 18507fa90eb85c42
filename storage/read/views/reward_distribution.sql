-- reward_distribution: one of 20 equal bins of a run's rewards for training, in a step
select
    run,  -- run that uses the rollouts
    step,  -- training step
    low,  -- least finite reward of the run
    high,  -- greatest finite reward of the run
    least(floor((reward - low) / coalesce(nullif((high - low) / 20, 0), 1)), 19)::int as bin,  -- number of the bin, from 0
    count(*) as num_traces  -- rollouts with such a reward
from rollouts
join (
    select run, min(reward) as low, max(reward) as high from rollouts where for_training and isfinite(reward) group by run
) as ends using (run)
where for_training and isfinite(reward)
group by all

-- reward_scales: the scale on which the rewards of an environment in a step are drawn; low is below high
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    for_training,  -- false of rollouts that score a policy
    environment,  -- environment
    case
        when least >= 0 and most <= 1 then 0
        when least >= -1 and most <= 1 then -1
        when least < most and isfinite(most - least) then least
        else least - 0.5
    end::double as low,  -- lower end: 0 or -1 where all rewards are within 0 or -1 and 1, so that steps can be compared
    case
        when least >= -1 and most <= 1 then 1
        when least < most and isfinite(most - least) then most
        else least + 0.5
    end::double as high  -- upper end
from (
    select run, step, for_training, environment, min(reward) as least, max(reward) as most
    from rollouts
    where outcome not in ('stopped', 'stale') and isfinite(reward)
    group by all
)

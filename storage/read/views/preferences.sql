-- preferences: the best and the worst rollout of one agent in a group of a step, where they earned different rewards
select
    run,  -- run that uses the rollouts
    step,  -- their step
    group_id,  -- group
    agent,  -- agent's seat
    any_value(environment) as environment,  -- environment
    any_value(example_id) as example_id,  -- example that both tried
    first(trace_id order by reward desc, trace_id) as chosen,  -- first of the best rollouts
    first(trace_id order by reward, trace_id) as rejected,  -- first of the worst rollouts
    max(reward) as chosen_reward,  -- reward of the best
    min(reward) as rejected_reward,  -- reward of the worst
    key as traces  -- work that scored both last
from rollouts
where for_training and trainable and policy_key <> '' and error_class is null and not isnan(reward)
    and trace_id not in (select trace_id from quarantined)
group by run, step, group_id, agent, key
having max(reward) > min(reward)

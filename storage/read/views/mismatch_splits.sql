-- mismatch_splits: the sampled tokens of a run, trained on with rl weight, that have one value of one property
with properties as (
    select
        trace_tokens.run,
        trace_tokens.key,
        trace_tokens.trace_id,
        trace_tokens.message,
        trace_tokens.place,
        trace_tokens.mismatch,
        trace_tokens.log_ratio,
        row_number() over of_message = 1 as first_of_turn,
        dense_rank() over of_trace as turn,
        [
            {
                'split': 'position',
                'value': case
                    when position < 64 then '0 to 63'
                    when position < 256 then '64 to 255'
                    when position < 1024 then '256 to 1023'
                    when position < 4096 then '1024 to 4095'
                    else 'from 4096 on'
                end,
                'place': floor(log2(greatest(position, 32) / 16) / 2)::integer
            },
            {'split': 'token', 'value': if(first_of_turn, 'first of a turn', 'later'), 'place': if(first_of_turn, 0, 1)},
            {
                'split': 'turn',
                'value': if(turn = 1, 'first', 'later: what came before may be cached'),
                'place': if(turn = 1, 0, 1)
            },
            {
                'split': 'branches',
                'value': if(num_branches = 1, 'one', 'several: forked, or a turn was tokenised again'),
                'place': if(num_branches = 1, 0, 1)
            },
            {
                'split': 'age',
                'value': (traces.policy_version + traces.staleness - trace_tokens.policy_version)::varchar,
                'place': (traces.policy_version + traces.staleness - trace_tokens.policy_version)::integer
            },
            {'split': 'engine', 'value': coalesce(record ->> '$.agent.config.client.base_url', 'not recorded'), 'place': 0}
        ] as splits
    from trace_tokens
    join traces on traces.key = trace_tokens.key and traces.trace_id = trace_tokens.trace_id
    where trained_rl_weight is not null and mismatch is not null
    window
        of_message as (partition by trace_tokens.run, trace_tokens.key, trace_tokens.trace_id, message order by trace_tokens.place),
        of_trace as (partition by trace_tokens.run, trace_tokens.key, trace_tokens.trace_id order by message)
)
select
    run,  -- run that trained on them
    split.split as split,  -- property: position in the sample, token, turn, branches of the rollout, age of the policy in steps, address of the engine
    split.value as "value",  -- its value
    count(*) as num_tokens,  -- tokens
    avg(mismatch order by key, trace_id, message, place) as mismatch_kl,  -- mean of r - 1 - log r, r the learner's probability over the engine's
    max(mismatch) as mismatch_kl_max,  -- the largest
    avg(log_ratio order by key, trace_id, message, place) as log_ratio  -- mean of the learner's log-prob less the engine's
from (select properties.* exclude (splits, first_of_turn, turn), unnest(splits) as split from properties)
group by run, split.split, split.value
order by run, split, min(split.place), "value"

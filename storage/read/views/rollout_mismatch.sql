-- rollout_mismatch: one rollout that was trained on with rl weight
select
    run,  -- run that trained on it
    key,  -- work that made its trace
    trace_id,  -- rollout
    avg(mismatch order by sample_id, token) as mismatch_kl  -- mean of r - 1 - log r over its tokens with rl weight, r the learner's probability over the engine's
from (
    select
        lineages.run,
        lineages.traces as key,
        samples.trace_id,
        samples.sample_id,
        unnest(range(len(packed_tokens.rl_weights))) as token,
        unnest(token_statistics.logprobs)::double - unnest(packed_tokens.logprobs)::double as apart,
        -- expm1(x) is 2 exp(x / 2) sinh(x / 2): exp(x) - 1 is not exact for small x.
        2 * exp(apart / 2) * sinh(apart / 2) - apart as mismatch,
        unnest(packed_tokens.rl_weights) as weight
    from lineages
    join samples on samples.key = lineages.samples
    -- Pieces of a step that was refilled share their samples: each has those of its own rollouts.
    semi join traces on traces.key = lineages.traces and traces.trace_id = samples.trace_id
    join packed_tokens on packed_tokens.key = lineages.batches and packed_tokens.sample_id = samples.sample_id
    join token_statistics
        on token_statistics.key = lineages.updates and token_statistics.sample_id = samples.sample_id
)
where weight <> 0
group by all

-- packed_tokens: one training sample in a row of a packed batch, token by token as the learner was given it
select
    key,  -- work that packed the batch
    sample_id,  -- sample
    logprobs[start + 1:stop] as logprobs,  -- log-probs of the engine; 0 where a token was not sampled
    rl_weights[start + 1:stop] as rl_weights,  -- weights in the rl loss, scaled where losses are divided by constant lengths
    ce_weights[start + 1:stop] as ce_weights,  -- weights in the ce loss, scaled alike
    ref_kl_weights[start + 1:stop] as ref_kl_weights  -- weights in the ref_kl loss, scaled alike
from (
    select
        key,
        unnest(sample_ids) as sample_id,
        unnest(cu_seqlens[1:len(sample_ids)]) as start,
        unnest(cu_seqlens[2:len(sample_ids) + 1]) as stop,
        logprobs,
        rl_weights,
        ce_weights,
        ref_kl_weights
    from batches
)

-- batch_tokens: one token in a row of a packed batch, as the learner was given it
select
    key,  -- work that packed the batch
    "row",  -- row of the batch, from 0
    token,  -- number of the token in the row, from 0
    if(len(sample_ids) > 0, len(list_filter(cu_seqlens, lambda border: border <= token)) - 1, null) as place,  -- sample of the row, from 0; null in a padding row
    token_id,  -- token
    logprob,  -- log-prob of the engine, temperature applied; 0 where it was not sampled
    temperature,  -- sampling temperature
    advantage,  -- advantage
    rl_weights,  -- weight in the rl loss
    ce_weights,  -- weight in the ce loss
    ref_kl_weights  -- weight in the ref_kl loss
from (
    select
        key,
        "row",
        sample_ids,
        cu_seqlens,
        unnest(range(len(token_ids))) as token,
        unnest(token_ids) as token_id,
        unnest(logprobs) as logprob,
        unnest(temperatures) as temperature,
        unnest(advantages) as advantage,
        unnest(rl_weights) as rl_weights,
        unnest(ce_weights) as ce_weights,
        unnest(ref_kl_weights) as ref_kl_weights
    from batches
)
order by key, "row", token

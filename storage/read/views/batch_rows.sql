-- batch_rows: one row of a packed batch
select
    batches.key,  -- work that packed the batch
    batches."row",  -- number of the row, from 0
    batches."update",  -- optimizer step that it is for, from 0
    batches.rank,  -- process that it is for
    batches.micro_step,  -- place among the rows of the process
    batches.sample_ids,  -- samples in order; none in a padding row
    batches.cu_seqlens,  -- where samples begin, and the end of the last one
    batches.rl_tokens,  -- tokens of the update with an rl weight
    batches.ce_tokens,  -- tokens of the update with a ce weight
    batches.ref_kl_tokens,  -- tokens of the update with a ref_kl weight
    if(len(sample_ids) > 0, cu_seqlens[-1], 0)::bigint as num_tokens,  -- tokens of its samples
    len(sample_ids) as num_samples,  -- samples
    if(len(sample_ids) > 0, cu_seqlens[-1], 0) / packings.tokens_per_row::double as fill  -- share of its room that samples take; null where the room is not known
from batches
left join packings on packings.key = batches.key

-- packed_samples: one training sample in a row of a batch
select
    packed.batch_key,  -- work that packed the batch
    samples.key as samples_key,  -- work that made the sample
    samples.trace_id,  -- rollout
    packed.sample_id,  -- sample
    packed."row",  -- row of the batch, from 0
    packed."update"  -- optimizer step on the batch, from 0
from (select key as batch_key, "row", "update", unnest(sample_ids) as sample_id from batches) as packed
-- Samples that were made again have the same ids: a batch joins those that it was packed from.
join (select distinct batches, samples from lineages) as sources on sources.batches = packed.batch_key
join samples on samples.key = sources.samples and samples.sample_id = packed.sample_id

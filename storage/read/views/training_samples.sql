-- training_samples: one training sample of a run, a branch of a rollout
select
    lineages.run,  -- run that made it
    lineages.traces as key,  -- work that made the rollout's trace
    samples.trace_id,  -- rollout
    samples.sample_id,  -- sample
    samples.branch,  -- branch of the rollout, from 0
    samples.path,  -- messages of the branch, from its root
    samples.reward,  -- reward of the rollout
    samples.baseline,  -- what was subtracted from it
    samples.advantage,  -- reward minus baseline, as the algorithm has it
    samples.num_tokens,  -- tokens of the branch
    packed_samples."row",  -- row of the batch; null where it was not packed
    packed_samples."update"  -- optimizer step on the batch; null where it was not packed
from lineages
join samples on samples.key = lineages.samples
-- Pieces of a step that was refilled share their samples: each has those of its own rollouts.
semi join traces on traces.key = lineages.traces and traces.trace_id = samples.trace_id
left join packed_samples
    on packed_samples.batch_key = lineages.batches and packed_samples.samples_key = samples.key
    and packed_samples.sample_id = samples.sample_id

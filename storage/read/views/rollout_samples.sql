-- rollout_samples: one rollout of which a run made training samples
select
    lineages.run,  -- run that made the samples
    lineages.traces as key,  -- work that made the rollout's trace
    samples.trace_id,  -- rollout
    any_value(samples.advantage) as advantage,  -- reward minus baseline, as the algorithm has it; alike in its samples
    any_value(samples.baseline) as baseline,  -- what was subtracted from the reward
    count(*) as num_samples  -- training samples, one for each branch
from (select distinct run, traces, samples from lineages) as lineages
join samples on samples.key = lineages.samples
-- Pieces of a step that was refilled share their samples: each has those of its own rollouts.
semi join traces on traces.key = lineages.traces and traces.trace_id = samples.trace_id
group by all

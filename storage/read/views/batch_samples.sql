-- batch_samples: one sample in a row of a packed batch
select
    placed.batch_key,  -- work that packed the batch
    placed."row",  -- row of the batch, from 0
    placed.place,  -- place in the row, from 0
    placed.start,  -- its first token in the row
    placed.sample_id,  -- sample
    coalesce(credited.trace_id, regexp_extract(placed.sample_id, '(?s)^(.*)/', 1)) as trace_id,  -- rollout
    coalesce(credited.branch, try_cast(regexp_extract(placed.sample_id, '[^/]*$') as int)) as branch,  -- branch of the rollout
    credited.group_id,  -- group; null where the row of the sample was dropped for its age
    credited.reward,  -- reward of the rollout
    credited.baseline,  -- what was subtracted from it
    credited.advantage,  -- reward minus baseline, as the algorithm has it
    coalesce(credited.num_tokens, placed.num_tokens) as num_tokens,  -- tokens
    sampled.environment,  -- environment; null where the row of the rollout was dropped for its age
    sampled.example_id,  -- example
    sampled.agent,  -- agent's seat
    sampled.policy_version,  -- version of the policy that sampled it
    sampled.staleness,  -- steps since that policy
    sampled.num_output_tokens,  -- tokens that were sampled
    sampled.key  -- work that made the rollout
from (
    select
        key as batch_key,
        "row",
        unnest(range(len(sample_ids))) as place,
        unnest(sample_ids) as sample_id,
        cu_seqlens[place + 1]::bigint as start,
        (cu_seqlens[place + 2] - cu_seqlens[place + 1])::bigint as num_tokens
    from batches
) as placed
left join (
    select
        sources.batches,
        samples.trace_id,
        samples.sample_id,
        samples.branch,
        samples.group_id,
        samples.reward,
        samples.baseline,
        samples.advantage,
        samples.num_tokens
    from samples join (select distinct batches, samples from lineages) as sources on sources.samples = samples.key
) as credited on credited.batches = placed.batch_key and credited.sample_id = placed.sample_id
left join (
    select
        sources.batches,
        traces.key,
        traces.trace_id,
        traces.environment,
        traces.example_id,
        traces.agent,
        traces.policy_version,
        traces.staleness,
        traces.num_output_tokens
    from traces join (select distinct batches, traces from lineages) as sources on sources.traces = traces.key
) as sampled
    on sampled.batches = placed.batch_key
    -- Samples may have been dropped for their age: their ids name the rollouts.
    and sampled.trace_id = coalesce(credited.trace_id, regexp_extract(placed.sample_id, '(?s)^(.*)/', 1))
order by placed."row", placed.place

-- trace_tokens: one token of a message of a rollout that a run uses
with message_tokens as (
    select
        lineages.* exclude place,
        message_sources.messages,
        messages.trace_id,
        messages.message,
        traces.policy_key <> '' as by_policy,
        if(by_policy and not policies_lost, traces.policy_version, null) as trace_version,
        greatest(traces.policy_version, newest.policy_version) as newest_version,
        unnest(range(len(token_ids))) as place,
        unnest(token_ids) as token_id,
        unnest(mask) as sampled,
        unnest(is_content) as is_content,
        -- Of a text that was only rendered, log-probs are zeros that nobody measured.
        unnest(list_transform(messages.logprobs, lambda logprob: if(by_policy or logprob <> 0, logprob, null))) as logprob,
        unnest(reference_logprobs.logprobs) as reference_logprob
    from lineages
    join traces on traces.key = lineages.traces
    join message_sources on message_sources.key = lineages.traces
    join messages on messages.key = message_sources.messages and messages.trace_id = traces.trace_id
    left join reference_logprobs
        on reference_logprobs.samples = lineages.samples and reference_logprobs.trace_id = traces.trace_id
        and reference_logprobs.message = messages.message
    left join (
        select key, trace_id, max(policy_version) as policy_version from token_policies group by all
    ) as newest on newest.key = message_sources.messages and newest.trace_id = traces.trace_id
),
token_versions as (
    select key as messages, trace_id, message, unnest(range(start, start + num_tokens)) as place, policy_version
    from token_policies
),
-- Where the messages of a branch begin in its sample; a message that branches share belongs to the first one.
starts as (
    select run, traces, trace_id, message, sample_id, coalesce(sum(num_tokens) over earlier, 0)::bigint as start
    from (
        select
            lineages.run,
            lineages.traces,
            samples.* exclude num_tokens,
            unnest(path) as message,
            unnest(range(len(path))) as depth
        from lineages
        join samples on samples.key = lineages.samples
        semi join traces on traces.key = lineages.traces and traces.trace_id = samples.trace_id
    )
    join (
        select message_sources.key as traces, trace_id, message, len(token_ids) as num_tokens
        from message_sources
        join messages on messages.key = message_sources.messages
    ) using (traces, trace_id, message)
    window earlier as (
        partition by run, traces, sample_id order by depth rows between unbounded preceding and 1 preceding
    )
    qualify row_number() over (partition by run, traces, trace_id, message order by branch) = 1
),
sample_tokens as (
    select
        lineages.run,
        lineages.traces,
        samples.sample_id,
        samples.branch,
        unnest(range(len(samples.rl_weights))) as position,
        unnest(samples.advantages) as credit,
        -- The first token of a sample has nothing before it: packing takes its weight away.
        if(position > 0, unnest(samples.rl_weights), 0) as rl_weight,
        if(position > 0, unnest(samples.ce_weights), 0) as ce_weight,
        if(position > 0, unnest(samples.ref_kl_weights), 0) as ref_kl_weight,
        rl_weight <> 0 or ce_weight <> 0 or ref_kl_weight <> 0 as weighted,
        unnest(if(updates is null, null, packed_tokens.rl_weights)) as packed_rl_weight,
        unnest(if(updates is null, null, packed_tokens.ce_weights)) as packed_ce_weight,
        unnest(if(updates is null, null, packed_tokens.ref_kl_weights)) as packed_ref_kl_weight,
        unnest(token_statistics.logprobs) as learner_logprob,
        unnest(token_statistics.entropies) as entropy,
        unnest(token_masks.masked) as masked,
        -- Masks are written of samples with a masked token alone: no row is an answer only where rows were kept.
        if((not masks_lost and updates in (select key from token_masks)) or unmasked.key is not null, false, null) as otherwise_masked
    from lineages
    join samples on samples.key = lineages.samples
    -- Pieces of a step that was refilled share their samples: each has those of its own rollouts.
    semi join traces on traces.key = lineages.traces and traces.trace_id = samples.trace_id
    left join packed_tokens on packed_tokens.key = lineages.batches and packed_tokens.sample_id = samples.sample_id
    left join token_statistics
        on token_statistics.key = lineages.updates and token_statistics.sample_id = samples.sample_id
    left join token_masks on token_masks.key = lineages.updates and token_masks.sample_id = samples.sample_id
    left join (select key from updates group by key having coalesce(max(masked_fraction), 0) = 0) as unmasked
        on unmasked.key = lineages.updates
),
positions as (
    select message_tokens.*, sample_id, start + place as position
    from message_tokens
    left join starts using (run, traces, trace_id, message)
)
select
    run,  -- run that uses the rollout
    traces as key,  -- work that made its trace
    trace_id,  -- rollout
    message,  -- message
    place,  -- number of the token in its message, from 0
    token_id,  -- token
    sampled,  -- whether the policy sampled it
    is_content,  -- body rather than template; null where that is not known
    case when sampled then coalesce(token_versions.policy_version, trace_version) end as policy_version,  -- version of the policy that sampled it; null where it was not, or no policy of the store did
    case when sampled then newest_version - coalesce(token_versions.policy_version, trace_version) end as policy_age,  -- how many versions older the policy that sampled it is than the newest one that sampled a part of the rollout
    branch,  -- first branch through its message, whose sample has its weights
    position,  -- number of the token in that sample, from 0
    case
        when packed_rl_weight <> 0 or packed_ce_weight <> 0 or packed_ref_kl_weight <> 0 then true
        when not (for_training and expired) then false
    end as trained,  -- whether it has weight in a batch row that an update was made on; null where rows that say it were dropped for their age
    case when rl_weight <> 0 then credit end as advantage,  -- advantage, where it has rl weight
    rl_weight,  -- weight in the rl loss as the advantage stage gave it, 0 for none; null where the rollout has no sample
    ce_weight,  -- weight in the ce loss as the advantage stage gave it, 0 for none; null where the rollout has no sample
    ref_kl_weight,  -- weight in the ref_kl loss as the advantage stage gave it, 0 for none; null where the rollout has no sample
    nullif(packed_rl_weight, 0) as trained_rl_weight,  -- weight in the rl loss as the batch row has it, scaled where losses are divided by constant lengths; null where it was not trained with one
    nullif(packed_ce_weight, 0) as trained_ce_weight,  -- weight in the ce loss as the batch row has it; null where it was not trained with one
    nullif(packed_ref_kl_weight, 0) as trained_ref_kl_weight,  -- weight in the ref_kl loss as the batch row has it; null where it was not trained with one
    case when sampled then logprob end as engine_logprob,  -- log-prob of the engine, temperature applied; null where it was not sampled, or nobody measured it
    case when weighted then learner_logprob end as learner_logprob,  -- log-prob of the learner before the update, temperature applied; null where it was not measured
    case when by_policy and weighted and sampled then sample_tokens.learner_logprob::double - logprob end as log_ratio,  -- learner_logprob - engine_logprob; null where no policy is known to have sampled it
    exp(log_ratio) as ratio,  -- importance ratio r: probability by the learner over that by the engine
    -- expm1(x) is 2 exp(x / 2) sinh(x / 2): exp(x) - 1 is not exact for small x.
    if(abs(log_ratio) < 1, 2 * exp(log_ratio / 2) * sinh(log_ratio / 2), exp(log_ratio) - 1) - log_ratio as mismatch,  -- r - 1 - log r of the importance ratio r; its mean over rl tokens is the mismatch KL of the step
    case when weighted then entropy end as entropy,  -- entropy of the learner's distribution, nats
    case when rl_weight <> 0 then coalesce(masked, otherwise_masked) end as outside,  -- whether the rl loss gave it no gradient: outside the trust region, clipped, or in a sequence that was left out; null without rl weight, or where masks were not kept
    case when sampled then reference_logprob end as reference_logprob,  -- log-prob of the frozen reference; null without one
    case when ref_kl_weight <> 0 then credit end as signal  -- log-prob of the reference less that of the engine, where it has ref_kl weight
from positions
left join sample_tokens using (run, traces, sample_id, position)
left join token_versions using (messages, trace_id, message, place)
order by traces, trace_id, message, place

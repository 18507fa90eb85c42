-- rollout_outcomes: one rollout that a run uses, and what decided about it
select
    candidates.run,  -- run that uses the rollout
    candidates.key,  -- work that made its trace
    trace_id,  -- rollout
    rules.outcome,  -- trained, filtered, errored, ...
    case rules.detail when 'error' then candidates.error_class when 'filter' then candidates.reason else rules.detail end as detail,  -- filter or class of error that decided; empty otherwise
    keep,  -- whether the filters keep it; null before they have judged it
    candidates.reason,  -- filter that decided against it
    detected  -- filters that found something, also those that only report
from (
    select
        lineages.run,
        lineages.traces as key,
        traces.trace_id,
        traces.error_class,
        verdicts.keep,
        verdicts.reason,
        verdicts.detected,
        case
            when not lineages.for_training then 'evaluated'
            when packed.trace_id is null and lineages.expired then 'expired'
            -- Packing drops rollouts without a weight, so a batch must exist to tell.
            when lineages.batches is not null and packed.trace_id is null then 'no weight'
            when lineages.updates is not null then 'trained'
            when lineages.decision in (select key from decisions where not approved) then 'refused'
            else 'pending'
        end as otherwise
    from lineages
    join traces on traces.key = lineages.traces
    left join verdicts on verdicts.key = lineages.verdicts and verdicts.trace_id = traces.trace_id
    left join (select distinct batch_key, samples_key, trace_id from packed_samples) as packed
        on packed.batch_key = lineages.batches and packed.samples_key = lineages.samples
        and packed.trace_id = traces.trace_id
) as candidates
join outcome_rules as rules
    on rules.otherwise = candidates.otherwise
    and rules.error_class is not distinct from
        case
            when candidates.error_class is null or candidates.error_class in ('straggler', 'stale', 'unscored')
                then candidates.error_class
            else 'error'
        end
    and rules.reason is not distinct from
        case when candidates.reason is null or candidates.reason = 'quarantined' then candidates.reason else 'filter' end

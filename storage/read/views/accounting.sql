-- accounting: the rollouts of a step and environment that had one outcome
select
    run,  -- run that uses the rollouts
    step,  -- their step; of evaluations the version of the policy
    environment,  -- environment
    outcome,  -- trained, filtered, errored, ...
    detail,  -- filter or class of error that decided; empty otherwise
    count(*) as num_traces,  -- rollouts
    sum(stale::int)::bigint as num_stale,  -- rollouts that an older policy than the step's sampled
    sum(num_tokens)::bigint as num_tokens,  -- tokens read and sampled
    sum(num_sampled_tokens)::bigint as num_sampled_tokens,  -- tokens sampled
    sum(seconds order by key, trace_id) as seconds  -- wall-clock of set-up, generation and scoring
from outcomes
group by all
order by run, step, environment, outcome, detail

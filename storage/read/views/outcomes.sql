-- outcomes: one rollout that a run uses
select
    run,  -- run that uses the rollout
    step,  -- its step; of an evaluation the version of the policy
    environment,  -- environment
    trace_id,  -- rollout
    outcome,  -- trained, filtered, errored, ...
    detail,  -- filter or class of error that decided; empty otherwise
    stale,  -- whether an older policy than the step's sampled it
    num_tokens,  -- tokens read and sampled
    num_output_tokens as num_sampled_tokens,  -- tokens sampled
    seconds,  -- wall-clock of set-up, generation and scoring
    key  -- work that made its trace
from rollouts

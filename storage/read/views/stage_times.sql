-- stage_times: one piece of work that a run uses, and when it was done
select
    run,  -- run that uses the work
    step,  -- its step; of evaluations the version of the policy
    stage,  -- stage that did it; `evaluation` for rollouts that score a policy
    key,  -- key of the work
    computed_by = run as own,  -- false where another run computed it, in that run's time
    computed_by,  -- run that computed it
    used_by,  -- all runs that use the work
    finished,  -- whether it is done; of other work some parts are committed
    started_at,  -- when it began
    finished_at,  -- when it ended, or its last part so far
    epoch(finished_at - started_at) as seconds,  -- wall-clock
    tokens  -- tokens that it handled
from recorded_work
order by started_at, key

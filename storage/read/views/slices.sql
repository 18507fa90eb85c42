-- slices: one table that a piece of work made rows of, as a run uses it
select
    run,  -- run that uses the rows
    stage_times.step,  -- their step; of evaluations the version of the policy
    stage_times.stage,  -- stage that made them; `evaluation` for rollouts that score a policy
    key,  -- key of the work that made them
    "table",  -- table
    sum(rows)::bigint as rows,  -- rows
    own,  -- whether the run computed them itself
    stage_times.computed_by,  -- run that computed them
    finished,  -- whether the work is done
    used_by,  -- all runs that use the work
    seconds  -- wall-clock of the work, so far where it is not done
from stage_times
join uses using (run, key)
group by all
order by all

-- one slice as a run uses it, also where another run computed it: what a join over runs needs
create table uses (
    run varchar,  -- the run that uses the slice
    step bigint,  -- the step
    stage varchar,  -- the stage that made it
    key varchar,  -- the key of the work that made it
    "table" varchar,  -- the table whose rows it holds
    attempt varchar,  -- the attempt that every row of the slice carries
    computed_by varchar,  -- the run that computed it
    rows bigint,  -- its rows
    primary key (run, key, table, attempt)
);

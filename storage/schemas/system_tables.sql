-- The tables that no stage writes: every row of theirs counts as soon as it is committed.

-- one finished piece of work as a run uses it, or one finished part of a stage that commits in parts
create table ledger (
    run varchar,  -- the run that uses it; its slices say which run computed it; the only partition
    step bigint,  -- the step
    stage varchar,  -- the stage's name
    stage_version integer,  -- the stage's version
    key varchar,  -- the key of the work
    part varchar,  -- empty for the whole; else the name of a committed part
    attempt varchar,  -- the attempt that finished
    section varchar,  -- the config section in the key, as canonical JSON
    inputs input[],  -- the keys that went in, by name
    outputs slice[],  -- the slices made, files and digests included
    started_at timestamptz,  -- when the attempt began
    finished_at timestamptz,  -- when the outputs were safe
    tokens bigint,  -- tokens handled; 0 where that means nothing
    versions varchar,  -- versions of the code and libraries at work, as JSON
    primary key (run, key, part)
);

-- one event in the life of a run
create table runs (
    run varchar,  -- the run; the only partition
    event varchar,  -- started, resumed, finished, failed, interrupted, evicted, refused, cancelled, crashed or
        -- removed; or lost, of a service of the run that ended unasked; join, leave or left, of an engine
    at timestamptz,  -- when, but never before an event that was committed earlier
    kind varchar,  -- train, sft, evaluate or replay
    config varchar,  -- the resolved config as JSON; secrets never
    parent_run varchar null,  -- the run this one branches off
    step bigint,  -- the step the event speaks of
    message varchar,  -- where it did not end well: what happened, what is safe; of a loss: which service, its end,
        -- which restart; of an engine that joins or leaves: its URL; of a start or resumption: `process BOOT_ID:PID:START_TICKS`
    flow_run varchar null,  -- the Prefect flow run
    host varchar,  -- where the run ran
    pid bigint,  -- the process
    primary key (run, event, at)
);

-- rollouts that were found to be unfit for training after they were made; one row is one finding
create table quarantines (
    run varchar,  -- the run whose rollouts were looked at, or `all-runs`; the only partition
    quarantine varchar,  -- the finding's id: a digest of its rollouts and its reason
    "where" varchar,  -- the condition that found them, in SQL over traces
    reason varchar,  -- why they are unfit
    trace_ids varchar[],  -- the rollouts, sorted
    at timestamptz,  -- when
    host varchar,  -- where it was said
    primary key (quarantine)
);

-- The name is the directory's in stores that exist.

-- one slice whose rows were dropped because of their age; the ledger still names it
create table retirements (
    run varchar,  -- the run that computed the rows; the only partition
    "table" varchar,  -- the table
    attempt varchar,  -- the attempt that made the rows
    rows bigint,  -- how many there were
    bytes bigint,  -- size of their files as first written
    at timestamptz,  -- when they were given up
    hours bigint,  -- the age in hours from which on rows were dropped
    primary key (run, table, attempt)
);

-- one note of a person on a run or on a rollout, or that a note was taken back
create table notes (
    run varchar,  -- the run; the only partition
    note varchar,  -- the note's id
    trace_id varchar,  -- the rollout; empty where it is on the run
    tags varchar[],  -- its tags, sorted
    text varchar,  -- what it says
    deleted boolean,  -- whether this row takes the note back
    at timestamptz,  -- when
    host varchar,  -- where it was written
    primary key (run, note, deleted)
);

-- one answer of a judge; no question of a store is asked again that has one which can be read
create table judge_answers (
    run varchar,  -- the run that asked; the only partition
    step bigint,  -- the step whose rollouts it was asked about
    judge varchar,  -- the judge's name in that run
    question varchar,  -- digest of what was asked: model, its version, messages, sampling
    response varchar,  -- the answer as it came, as JSON
    input_tokens bigint,  -- tokens of the prompt, as the API counts them; 0 where it does not say
    output_tokens bigint,  -- tokens of the answer, likewise
    cost double,  -- by the prices of that run
    seconds double,  -- wall-clock, requests that failed before it included
    at timestamptz,  -- when it came
    primary key (run, question, at)
);

-- The tables that stages write, all of which have the columns of a slice besides (`SLICE_COLUMNS`). The comment above a
-- table says what one row is, that of a column its meaning; a column is never null unless it says `null`.

-- one row of a dataset or generator that an environment turns into a task
create table examples (
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- durable id within the environment
    split varchar,  -- train or eval, by hash of the example's content
    task varchar,  -- the task's data as JSON, as the environment server takes it
    primary key (environment, example_id)
);

-- one rollout to be made: which example, in which group, with which seed
create table assignments (
    assignment_id varchar,  -- group id, a slash, the member's number
    group_id varchar,  -- rollouts of one example that are compared with each other
    member integer,  -- the rollout's number within its group; 0-based
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- the example tried
    seed bigint,  -- sampling seed of this rollout
    primary key (assignment_id)
);

-- one agent's finished or failed rollout
create table traces (
    trace_id varchar,  -- id given by the environment, or made here for a rollout that left no trace
    episode_id varchar,  -- the environment run that made the trace
    assignment_id varchar,  -- the assignment it answers
    group_id varchar,  -- the assignment's group
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- the example tried
    agent varchar,  -- the agent's seat in the environment
    trainable boolean,  -- whether the trace's tokens belong to the policy
    policy_key varchar,  -- the policy that sampled it
    policy_version bigint,  -- the step that made that policy; 0 is the run's first policy
    staleness bigint,  -- this step minus policy_version
    temperature float,  -- sampling temperature
    reward double null,  -- total reward; null where scoring did not run, which is not zero
    rewards varchar,  -- named rewards as JSON: {name: {score, weight} or null}
    metrics varchar,  -- named metrics as JSON
    info varchar,  -- what the environment noted, as JSON
    stop_condition varchar null,  -- what ended the rollout
    is_truncated boolean,  -- ended by a limit on tokens or turns
    num_turns integer,  -- sampled messages
    num_branches integer,  -- root-to-leaf paths
    num_input_tokens bigint,  -- tokens fed in, each once
    num_output_tokens bigint,  -- tokens sampled
    error_class varchar null,  -- infrastructure, timeout, model, environment, cancelled, incomplete
    error_type varchar null,  -- the exception's type name
    error_message varchar null,  -- the exception's text
    error_traceback varchar null,  -- the real traceback, where there is one
    started_at timestamptz,  -- when the rollout began
    setup_seconds double,  -- wall-clock of set-up
    generation_seconds double,  -- wall-clock of the agent, model calls included
    model_seconds double,  -- wall-clock of model calls alone
    scoring_seconds double,  -- wall-clock of scoring
    record varchar,  -- the rest of the trace as JSON, enough to rebuild it with its messages
    primary key (trace_id)
);

-- one node of a trace's message graph: text once, its exact tokens once
create table messages (
    trace_id varchar,  -- the trace
    message integer,  -- the node's number in the trace; 0-based
    parent integer null,  -- the preceding node; null at a root
    role varchar,  -- system, user, assistant or tool
    content varchar null,  -- the text; null where there is none
    body varchar,  -- the whole message as JSON, tool calls and parts included
    sampled boolean,  -- whether a model call of this rollout produced it
    token_ids integer[],  -- the tokens this node adds; paths concatenate to what the model saw
    mask boolean[],  -- per token: sampled by the policy
    is_content boolean[],  -- per token: body rather than template; empty where unknown
    logprobs float[],  -- per token: the engine's log-prob, temperature applied; 0 where not sampled
    primary key (trace_id, message)
);

-- a run of tokens that one policy sampled; of traces that several policies sampled, and there of all their tokens
create table token_policies (
    trace_id varchar,  -- the trace, whose own policy is the oldest of them
    message integer,  -- the node's number in the trace
    start integer,  -- the place of the run's first token in the message; 0-based
    num_tokens integer,  -- sampled tokens of the run, one after the other
    policy_key varchar,  -- the policy that sampled them
    policy_version bigint,  -- the version of that policy
    primary key (trace_id, message, start)
);

-- the experts that the engine chose for the tokens of a message (`training.router_replay`)
create table routed_experts (
    trace_id varchar,  -- the trace
    message integer,  -- the node's number in the trace
    width integer,  -- bytes of an expert's number: 1, or 2 of a model with more than 256 experts
    num_layers integer,  -- layers of the model
    top_k integer,  -- experts that a token has in a layer
    experts blob,  -- per token, layer and choice an expert's number, little-endian; all 0 of a token without a record
    primary key (trace_id, message)
);

-- what the engine answered to one model call of a rollout that has not ended (`rollout.keep_turns`); no stage reads
-- it, and it goes when the rollout's group is committed
create table turns (
    group_id varchar,  -- its group
    assignment_id varchar,  -- the assignment of the rollout
    request varchar,  -- digest of what was asked: tokens, sampling parameters, model
    answer varchar,  -- the answer as it came, as JSON
    policies varchar[],  -- the policies that sampled it; empty where a frozen model did
    primary key (assignment_id, request)
);

-- an image that messages or records of a group's traces refer to by its digest; its bytes once
create table images (
    group_id varchar,  -- the group whose traces use it
    digest varchar,  -- SHA-256 over media type, a zero byte and the bytes, in hex
    media_type varchar,  -- the media type with its parameters, as the data URL had it
    data blob,  -- the image's bytes
    trace_id varchar,  -- the trace that used it first
    message integer null,  -- the message of that trace; null where the trace's record has it
    primary key (group_id, digest)
);

-- one tensor that the model's processor made of an image of a group, as the learner gives it to the model
create table image_tensors (
    group_id varchar,  -- the group whose messages brought the image in
    digest varchar,  -- the image's digest in table images
    name varchar,  -- the tensor's name, as the processor has it: pixel_values, image_grid_thw
    dtype varchar,  -- the type of its values, as numpy spells it, little-endian
    shape bigint[],  -- its shape; images are joined along the first axis
    data blob,  -- its values, row after row
    num_tokens integer,  -- tokens that stand for the image in a prompt
    primary key (group_id, digest, name)
);

-- one number that an engine counted while rollouts of a step were sampled; for runs with engine.metrics
create table engine_metrics (
    interval varchar,  -- an uninterrupted time of sampling: of a step that lost its engine there are more
    engine integer,  -- the engine's number among those that sampled; 0-based
    name varchar,  -- what was counted: tokens, requests, seconds; of latencies the counts by bound
    value double,  -- how much in this time, whether the engine was started again in it or not
    primary key (interval, engine, name)
);

-- one group that a step took from the stream of rollouts ahead of the training
create table intakes (
    place integer,  -- its place among the groups of the step, in the order in which they ended; 0-based
    group_id varchar,  -- the group
    assigned_step bigint,  -- the step whose assignment named it
    policy_key varchar,  -- the policy that sampled it; frozen models have their own
    policy_version bigint,  -- the version of that policy
    age bigint,  -- steps from that policy to the one that is trained on it
    assignment_ids varchar[],  -- the assignments of its members
    primary key (group_id)
);

-- one group of the stream that came to be too old for any step before one took it
create table stale_groups (
    group_id varchar,  -- the group
    assigned_step bigint,  -- the step whose assignment named it
    environment varchar,  -- its environment
    example_id varchar,  -- its example
    policy_key varchar,  -- the oldest policy that sampled a part of it; empty where it was not begun
    policy_version bigint null,  -- the version of that policy; null where it was not begun
    has_ended boolean,  -- whether it had ended and was left over; else it was stopped, or not begun
    assignment_ids varchar[],  -- the assignments of its members
    primary key (group_id)
);

-- what was measured until a group was taken, since the one before it was, of whichever step
create table intake_loads (
    group_id varchar,  -- the group that a step took from the stream
    seconds double,  -- since the group before it was taken
    in_flight double,  -- mean number of rollouts under way
    max_in_flight bigint,  -- most that might have been: rollout.max_in_flight
    idle_seconds double,  -- in which no rollout was under way
    learner_waited_seconds double,  -- in which the learner waited for rollouts
    num_ended bigint,  -- rollouts that came to an end, errors included
    num_cancelled bigint,  -- rollouts that were stopped before
    requests_running double null,  -- null, as the two below: `engine_metrics` has what an engine reports
    requests_waiting double null,  -- null
    cache_use double null,  -- null
    primary key (group_id)
);

-- what the filters found on a trace and whether it is kept
create table verdicts (
    trace_id varchar,  -- the trace
    group_id varchar,  -- its group
    keep boolean,  -- whether it goes on to the advantage stage
    reason varchar null,  -- the first enforcing filter that found something; null where kept
    detected varchar[],  -- every filter that found something, enforcing or not
    evidence varchar,  -- the numbers that decided, as JSON by filter
    primary key (trace_id)
);

-- Tokens are in messages alone: a sample says which of them, and its streams follow that path.

-- one training sample: a branch of a kept trace with its advantage and per-token loss weights
create table samples (
    sample_id varchar,  -- trace id, a slash, the branch's number
    trace_id varchar,  -- the trace
    branch integer,  -- the branch's number; leaves in node order, 0-based
    group_id varchar,  -- its group
    path integer[],  -- message numbers from root to leaf
    reward double null,  -- the trace's reward; null where the component needs none
    baseline double null,  -- what was subtracted; null where there is none
    advantage double null,  -- the trace's scalar advantage; null where there is none
    num_tokens bigint,  -- length of the branch
    advantages float[],  -- per token of the branch: advantage; 0 where rl_weights is 0
    rl_weights float[],  -- per token: weight in the rl component; 0 is not a member
    ce_weights float[],  -- per token: weight in the cross-entropy component; 0 is not a member
    ref_kl_weights float[],  -- per token: weight in the reference-KL component; 0 is not a member
    primary key (sample_id)
);

-- Tokens are repeated here, so that the learner reads one table and looks nothing up.

-- one packed row, in the layout that the learner maps to tensors
create table batches (
    row integer,  -- the row's number in the batch; 0-based
    update integer,  -- the optimizer step within the batch that it belongs to; 0-based
    rank integer,  -- the data-parallel rank for which it was packed; the learner deals rows anew
    micro_step integer,  -- the micro-batch within that rank
    sample_ids varchar[],  -- the samples in the row, in order; empty in a padding row
    cu_seqlens integer[],  -- segment borders: 0, then the running sum of segment lengths
    token_ids integer[],  -- per token
    logprobs float[],  -- per token: the engine's log-prob; 0 where not sampled
    temperatures float[],  -- per token: sampling temperature
    advantages float[],  -- per token
    rl_weights float[],  -- per token; 0 at the first token of every segment
    ce_weights float[],  -- per token; 0 at the first token of every segment
    ref_kl_weights float[],  -- per token; 0 at the first token of every segment
    rl_tokens bigint,  -- tokens of the update with a non-zero rl weight: the denominator
    ce_tokens bigint,  -- the same for cross-entropy
    ref_kl_tokens bigint,  -- the same for reference KL
    primary key (row)
);

-- an image among the tokens of a packed row; its tensors stand where the batch has the image first
create table batch_images (
    row integer,  -- the row's number in the batch
    place integer,  -- the image's number in the row, in the order of its tokens; 0-based
    "offset" integer,  -- the first token of the row that stands for it
    num_tokens integer,  -- how many tokens stand for it
    digest varchar,  -- the image's digest in table images
    names varchar[],  -- its tensors' names; none where an earlier row or place has the image
    dtypes varchar[],  -- the type of each tensor's values
    shapes bigint[][],  -- the shape of each tensor
    data blob[],  -- the values of each tensor
    primary key (row, place)
);

-- the experts of the tokens of a packed row, as in table routed_experts
create table batch_experts (
    row integer,  -- the row's number in the batch
    width integer,  -- bytes of an expert's number
    num_layers integer,  -- layers of the model
    top_k integer,  -- experts that a token has in a layer
    experts blob,  -- per token of the row, layer and choice; all 0 of a token without a record
    primary key (row)
);

-- one optimizer step: from which policy to which, and what it measured
create table updates (
    version bigint,  -- the policy version made: its step plus one
    update integer,  -- the optimizer step within the batch; 0-based
    policy_key_in varchar,  -- the policy trained from
    weights_sha256_in varchar,  -- digest of the weights trained from
    weights_sha256 varchar,  -- digest of the weights made, over names, types, shapes and bytes
    learning_rate double,  -- of this step
    loss double,  -- total loss
    rl_loss double,  -- rl component, normalised by rl_tokens
    ce_loss double,  -- cross-entropy component, normalised by ce_tokens
    ref_kl_loss double,  -- reference-KL component, normalised by ref_kl_tokens
    grad_norm double,  -- before clipping
    entropy double null,  -- mean over rl tokens, nats
    mismatch_kl double null,  -- mean over rl tokens of r - 1 - log r, engine against learner
    mismatch_kl_max double null,  -- maximum of the same
    masked_fraction double null,  -- share of rl tokens outside the trust region
    num_rows bigint,  -- packed rows
    num_tokens bigint,  -- tokens in packed rows
    rl_tokens bigint,  -- denominator of the rl component
    ce_tokens bigint,  -- denominator of the cross-entropy component
    ref_kl_tokens bigint,  -- denominator of the reference-KL component
    has_optimizer boolean,  -- whether optimizer state was saved with the policy
    metrics varchar,  -- further metrics as JSON
    primary key (version, update)
);

-- what the learner measured on the tokens of one sample
create table token_statistics (
    sample_id varchar,  -- the sample
    logprobs float[],  -- per token: the learner's log-prob before the update; 0 where nothing has weight
    entropies float[],  -- per token: the learner's entropy in nats; 0 where nothing has weight
    primary key (sample_id)
);

-- which tokens the rl loss gave no gradient of their surrogate; only of steps and samples where there were any
create table token_masks (
    sample_id varchar,  -- the sample
    masked boolean[],  -- per token: outside the trust region, clipped, or in a sequence that was left out
    primary key (sample_id)
);

-- one version of the weights: a complete directory or absent
create table policies (
    policy_key varchar,  -- the key of the training that made it, or of the import
    version bigint,  -- 0 is the run's first policy; training at step k makes version k + 1
    parent_key varchar null,  -- the policy it was trained from; null for an import
    weights_sha256 varchar,  -- digest of the weights, over names, types, shapes and bytes
    has_optimizer boolean,  -- whether optimizer state lies beside the weights
    probe_token_ids integer[],  -- a fixed token sequence
    probe_logprobs float[],  -- the learner's log-prob of each of its tokens given those before; first is 0
    primary key (policy_key)
);

-- what a judge said of one trace
create table judgements (
    trace_id varchar,  -- the trace
    judge varchar,  -- the judge's name
    question varchar,  -- digest of what was asked, as in table judge_answers; traces may share one
    prompt varchar,  -- the prompt
    answer varchar null,  -- the text of the answer; null where none came
    score double null,  -- the score that was read from it; null where there is none, which is not zero
    weight double,  -- weight of the score in the reward; 0 of a held-out judge
    asked boolean,  -- whether the answer was paid for in this step, and for this trace first
    input_tokens bigint,  -- tokens of the prompt, as the API counts them
    output_tokens bigint,  -- tokens of the answer
    cost double,  -- price of the answer, by the prices of the run that asked
    seconds double,  -- wall-clock until the answer came
    error_type varchar null,  -- why there is no score, by type; null where there is one
    error_message varchar null,  -- its text
    primary key (trace_id, judge)
);

-- one recorded trace scored again with the environment's reward functions of today, beside what it had
create table regrades (
    trace_id varchar,  -- the trace
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- the example tried
    reward_before double null,  -- recorded total reward; null where scoring did not run
    reward double null,  -- total reward now; null where scoring did not run or failed
    rewards_before varchar,  -- recorded named rewards as JSON
    rewards varchar,  -- named rewards now as JSON
    changed boolean,  -- whether the total reward is another, or appeared or went
    error_type varchar null,  -- what scoring raised now; null where it did not
    error_message varchar null,  -- its text
    seconds double,  -- wall-clock of scoring now
    primary key (trace_id)
);

-- one decision at a gate: whether a step's batch goes on to training
create table decisions (
    gate varchar,  -- pause (a person decides) or rule
    approved boolean,  -- whether the batch goes on
    rule varchar null,  -- the rule in SQL; null where a person decided
    decided_by varchar,  -- rule, or the person's name as given
    reason varchar,  -- what was said or found
    figures varchar,  -- the batch's figures that were shown or asked, as JSON
    asked_at timestamptz,  -- when the decision was asked for
    decided_at timestamptz,  -- when it was made
    primary key (gate)
);

-- what a frozen reference, or the policy shown a demonstration, gave the sampled tokens of one message
create table references (
    trace_id varchar,  -- the trace
    message integer,  -- the node's number in the trace
    logprobs float[],  -- per token of the message: the reference's log-prob; 0 where it was not scored
    primary key (trace_id, message)
);

-- what a stateful estimator of advantages remembers of one example and agent after a step
create table estimator_states (
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- the example; empty where the estimator keeps none apart
    agent varchar,  -- the agent's seat; empty where the estimator keeps none apart
    "values" double[],  -- what the estimator keeps, in its own order
    num_traces bigint,  -- kept rewarded traces that went into it, of all steps
    primary key (environment, example_id, agent)
);

-- how hard an example was for the policy when it was tried last
create table difficulties (
    environment varchar,  -- the environment's name in this run
    example_id varchar,  -- the example
    reward double,  -- mean reward of the last group's trainable traces that were scored
    num_groups bigint,  -- groups of it that were scored, of all steps
    primary key (environment, example_id)
);

-- one number of a finished step; what is shown or exported of steps is read from here
create table metrics (
    scope varchar,  -- the environment's name in this run, all of them together, or empty: of the step
    name varchar,  -- the measure without its scope: reward/mean, update/loss
    value double,  -- the number; NaN and infinities are kept as they are
    primary key (scope, name)
);

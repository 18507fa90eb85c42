"""The schemas of the tables that stages write, with the meaning of each column, and the list of all tables.

Tables that no stage writes are in `storage.schemas.system_tables`.

A stage hands over tables with exactly the `arrow` schema of its tables; storage adds the slice columns, checks the
whole against `stored` and refuses anything else, because Delta Lake casts in silence (7.5 becomes 7).
"""

import pyarrow as pa

from storage.schemas.contract import (
    FLAGS,
    FLOATS,
    INDICES,
    MOMENT,
    NAMES,
    NUMBERS,
    SHAPE,
    TOKENS,
    Column,
    Table,
    list_of,
)
from storage.schemas.system_tables import SYSTEM_TABLES

EXAMPLES = Table(
    "examples",
    "one row of a dataset or generator that an environment turns into a task",
    ("environment", "example_id"),
    (
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "durable id within the environment"),
        Column("split", pa.string(), "train or eval, by hash of the example's content"),
        Column("task", pa.string(), "the task's data as JSON, as the environment server takes it"),
    ),
)
ASSIGNMENTS = Table(
    "assignments",
    "one rollout to be made: which example, in which group, with which seed",
    ("assignment_id",),
    (
        Column("assignment_id", pa.string(), "group id, a slash, the member's number"),
        Column("group_id", pa.string(), "rollouts of one example that are compared with each other"),
        Column("member", pa.int32(), "the rollout's number within its group; 0-based"),
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "the example tried"),
        Column("seed", pa.int64(), "sampling seed of this rollout"),
    ),
)
TRACES = Table(
    "traces",
    "one agent's finished or failed rollout",
    ("trace_id",),
    (
        Column("trace_id", pa.string(), "id given by the environment, or made here for a rollout that left no trace"),
        Column("episode_id", pa.string(), "the environment run that made the trace"),
        Column("assignment_id", pa.string(), "the assignment it answers"),
        Column("group_id", pa.string(), "the assignment's group"),
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "the example tried"),
        Column("agent", pa.string(), "the agent's seat in the environment"),
        Column("trainable", pa.bool_(), "whether the trace's tokens belong to the policy"),
        Column("policy_key", pa.string(), "the policy that sampled it"),
        Column("policy_version", pa.int64(), "the step that made that policy; 0 is the run's first policy"),
        Column("staleness", pa.int64(), "this step minus policy_version"),
        Column("temperature", pa.float32(), "sampling temperature"),
        Column("reward", pa.float64(), "total reward; null where scoring did not run, which is not zero", True),
        Column("rewards", pa.string(), "named rewards as JSON: {name: {score, weight} or null}"),
        Column("metrics", pa.string(), "named metrics as JSON"),
        Column("info", pa.string(), "what the environment noted, as JSON"),
        Column("stop_condition", pa.string(), "what ended the rollout", True),
        Column("is_truncated", pa.bool_(), "ended by a limit on tokens or turns"),
        Column("num_turns", pa.int32(), "sampled messages"),
        Column("num_branches", pa.int32(), "root-to-leaf paths"),
        Column("num_input_tokens", pa.int64(), "tokens fed in, each once"),
        Column("num_output_tokens", pa.int64(), "tokens sampled"),
        Column("error_class", pa.string(), "infrastructure, timeout, model, environment, cancelled, incomplete", True),
        Column("error_type", pa.string(), "the exception's type name", True),
        Column("error_message", pa.string(), "the exception's text", True),
        Column("error_traceback", pa.string(), "the real traceback, where there is one", True),
        Column("started_at", MOMENT, "when the rollout began"),
        Column("setup_seconds", pa.float64(), "wall-clock of set-up"),
        Column("generation_seconds", pa.float64(), "wall-clock of the agent, model calls included"),
        Column("model_seconds", pa.float64(), "wall-clock of model calls alone"),
        Column("scoring_seconds", pa.float64(), "wall-clock of scoring"),
        Column("record", pa.string(), "the rest of the trace as JSON, enough to rebuild it with its messages"),
    ),
)
MESSAGES = Table(
    "messages",
    "one node of a trace's message graph: text once, its exact tokens once",
    ("trace_id", "message"),
    (
        Column("trace_id", pa.string(), "the trace"),
        Column("message", pa.int32(), "the node's number in the trace; 0-based"),
        Column("parent", pa.int32(), "the preceding node; null at a root", True),
        Column("role", pa.string(), "system, user, assistant or tool"),
        Column("content", pa.string(), "the text; null where there is none", True),
        Column("body", pa.string(), "the whole message as JSON, tool calls and parts included"),
        Column("sampled", pa.bool_(), "whether a model call of this rollout produced it"),
        Column("token_ids", TOKENS, "the tokens this node adds; paths concatenate to what the model saw"),
        Column("mask", FLAGS, "per token: sampled by the policy"),
        Column("is_content", FLAGS, "per token: body rather than template; empty where unknown"),
        Column("logprobs", FLOATS, "per token: the engine's log-prob, temperature applied; 0 where not sampled"),
    ),
    aligned=("token_ids", "mask", "logprobs"),
    aligned_or_empty=("is_content",),
    logprobs=("logprobs",),
    only_where=(("mask", "sampled"),),
)
TOKEN_POLICIES = Table(
    "token_policies",
    "a run of tokens that one policy sampled; of traces that several policies sampled, and there of all their tokens",
    ("trace_id", "message", "start"),
    (
        Column("trace_id", pa.string(), "the trace, whose own policy is the oldest of them"),
        Column("message", pa.int32(), "the node's number in the trace"),
        Column("start", pa.int32(), "the place of the run's first token in the message; 0-based"),
        Column("num_tokens", pa.int32(), "sampled tokens of the run, one after the other"),
        Column("policy_key", pa.string(), "the policy that sampled them"),
        Column("policy_version", pa.int64(), "the version of that policy"),
    ),
)
IMAGES = Table(
    "images",
    "an image that messages or records of a group's traces refer to by its digest; its bytes once",
    ("group_id", "digest"),
    (
        Column("group_id", pa.string(), "the group whose traces use it"),
        Column("digest", pa.string(), "SHA-256 over media type, a zero byte and the bytes, in hex"),
        Column("media_type", pa.string(), "the media type with its parameters, as the data URL had it"),
        Column("data", pa.binary(), "the image's bytes"),
        Column("trace_id", pa.string(), "the trace that used it first"),
        Column("message", pa.int32(), "the message of that trace; null where the trace's record has it", True),
    ),
)
IMAGE_TENSORS = Table(
    "image_tensors",
    "one tensor that the model's processor made of an image of a group, as the learner gives it to the model",
    ("group_id", "digest", "name"),
    (
        Column("group_id", pa.string(), "the group whose messages brought the image in"),
        Column("digest", pa.string(), "the image's digest in table images"),
        Column("name", pa.string(), "the tensor's name, as the processor has it: pixel_values, image_grid_thw"),
        Column("dtype", pa.string(), "the type of its values, as numpy spells it, little-endian"),
        Column("shape", SHAPE, "its shape; images are joined along the first axis"),
        Column("data", pa.binary(), "its values, row after row"),
        Column("num_tokens", pa.int32(), "tokens that stand for the image in a prompt"),
    ),
)
ENGINE_METRICS = Table(
    "engine_metrics",
    "one number that an engine counted while rollouts of a step were sampled; for runs with engine.metrics",
    ("interval", "engine", "name"),
    (
        Column(
            "interval", pa.string(), "an uninterrupted time of sampling: of a step that lost its engine there are more"
        ),
        Column("engine", pa.int32(), "the engine's number among those that sampled; 0-based"),
        Column("name", pa.string(), "what was counted: tokens, requests, seconds; of latencies the counts by bound"),
        Column("value", pa.float64(), "how much in this time, whether the engine was started again in it or not"),
    ),
)
INTAKES = Table(
    "intakes",
    "one group that a step took from the stream of rollouts ahead of the training",
    ("group_id",),
    (
        Column(
            "place", pa.int32(), "its place among the groups of the step, in the order in which they ended; 0-based"
        ),
        Column("group_id", pa.string(), "the group"),
        Column("assigned_step", pa.int64(), "the step whose assignment named it"),
        Column("policy_key", pa.string(), "the policy that sampled it; frozen models have their own"),
        Column("policy_version", pa.int64(), "the version of that policy"),
        Column("age", pa.int64(), "steps from that policy to the one that is trained on it"),
        Column("assignment_ids", NAMES, "the assignments of its members"),
    ),
)
STALE_GROUPS = Table(
    "stale_groups",
    "one group of the stream that came to be too old for any step before one took it",
    ("group_id",),
    (
        Column("group_id", pa.string(), "the group"),
        Column("assigned_step", pa.int64(), "the step whose assignment named it"),
        Column("environment", pa.string(), "its environment"),
        Column("example_id", pa.string(), "its example"),
        Column("policy_key", pa.string(), "the oldest policy that sampled a part of it; empty where it was not begun"),
        Column("policy_version", pa.int64(), "the version of that policy; null where it was not begun", True),
        Column("has_ended", pa.bool_(), "whether it had ended and was left over; else it was stopped, or not begun"),
        Column("assignment_ids", NAMES, "the assignments of its members"),
    ),
)
INTAKE_LOADS = Table(
    "intake_loads",
    "what was measured until a group was taken, since the one before it was, of whichever step",
    ("group_id",),
    (
        Column("group_id", pa.string(), "the group that a step took from the stream"),
        Column("seconds", pa.float64(), "since the group before it was taken"),
        Column("in_flight", pa.float64(), "mean number of rollouts under way"),
        Column("max_in_flight", pa.int64(), "most that might have been: rollout.max_in_flight"),
        Column("idle_seconds", pa.float64(), "in which no rollout was under way"),
        Column("learner_waited_seconds", pa.float64(), "in which the learner waited for rollouts"),
        Column("num_ended", pa.int64(), "rollouts that came to an end, errors included"),
        Column("num_cancelled", pa.int64(), "rollouts that were stopped before"),
        Column("requests_running", pa.float64(), "mean number in the engine's batch; null where it reports none", True),
        Column("requests_waiting", pa.float64(), "mean number in its queue", True),
        Column("cache_use", pa.float64(), "mean share of its KV cache in use", True),
    ),
)
VERDICTS = Table(
    "verdicts",
    "what the filters found on a trace and whether it is kept",
    ("trace_id",),
    (
        Column("trace_id", pa.string(), "the trace"),
        Column("group_id", pa.string(), "its group"),
        Column("keep", pa.bool_(), "whether it goes on to the advantage stage"),
        Column("reason", pa.string(), "the first enforcing filter that found something; null where kept", True),
        Column("detected", NAMES, "every filter that found something, enforcing or not"),
        Column("evidence", pa.string(), "the numbers that decided, as JSON by filter"),
    ),
)
# Tokens are in messages alone: a sample says which of them, and its streams follow that path.
SAMPLES = Table(
    "samples",
    "one training sample: a branch of a kept trace with its advantage and per-token loss weights",
    ("sample_id",),
    (
        Column("sample_id", pa.string(), "trace id, a slash, the branch's number"),
        Column("trace_id", pa.string(), "the trace"),
        Column("branch", pa.int32(), "the branch's number; leaves in node order, 0-based"),
        Column("group_id", pa.string(), "its group"),
        Column("path", INDICES, "message numbers from root to leaf"),
        Column("reward", pa.float64(), "the trace's reward; null where the component needs none", True),
        Column("baseline", pa.float64(), "what was subtracted; null where there is none", True),
        Column("advantage", pa.float64(), "the trace's scalar advantage; null where there is none", True),
        Column("num_tokens", pa.int64(), "length of the branch"),
        Column("advantages", FLOATS, "per token of the branch: advantage; 0 where rl_weights is 0"),
        Column("rl_weights", FLOATS, "per token: weight in the rl component; 0 is not a member"),
        Column("ce_weights", FLOATS, "per token: weight in the cross-entropy component; 0 is not a member"),
        Column("ref_kl_weights", FLOATS, "per token: weight in the reference-KL component; 0 is not a member"),
    ),
    aligned=("advantages", "rl_weights", "ce_weights", "ref_kl_weights"),
)
# Tokens are repeated here, so that the learner reads one table and looks nothing up.
BATCHES = Table(
    "batches",
    "one packed row, in the layout that the learner maps to tensors",
    ("row",),
    (
        Column("row", pa.int32(), "the row's number in the batch; 0-based"),
        Column("update", pa.int32(), "the optimizer step within the batch that it belongs to; 0-based"),
        Column("rank", pa.int32(), "the data-parallel rank for which it was packed; the learner deals rows anew"),
        Column("micro_step", pa.int32(), "the micro-batch within that rank"),
        Column("sample_ids", NAMES, "the samples in the row, in order; empty in a padding row"),
        Column("cu_seqlens", INDICES, "segment borders: 0, then the running sum of segment lengths"),
        Column("token_ids", TOKENS, "per token"),
        Column("logprobs", FLOATS, "per token: the engine's log-prob; 0 where not sampled"),
        Column("temperatures", FLOATS, "per token: sampling temperature"),
        Column("advantages", FLOATS, "per token"),
        Column("rl_weights", FLOATS, "per token; 0 at the first token of every segment"),
        Column("ce_weights", FLOATS, "per token; 0 at the first token of every segment"),
        Column("ref_kl_weights", FLOATS, "per token; 0 at the first token of every segment"),
        Column("rl_tokens", pa.int64(), "tokens of the update with a non-zero rl weight: the denominator"),
        Column("ce_tokens", pa.int64(), "the same for cross-entropy"),
        Column("ref_kl_tokens", pa.int64(), "the same for reference KL"),
    ),
    aligned=("token_ids", "logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "ref_kl_weights"),
    logprobs=("logprobs",),
    row_by_row=True,
)
BATCH_IMAGES = Table(
    "batch_images",
    "an image among the tokens of a packed row; its tensors stand where the batch has the image first",
    ("row", "place"),
    (
        Column("row", pa.int32(), "the row's number in the batch"),
        Column("place", pa.int32(), "the image's number in the row, in the order of its tokens; 0-based"),
        Column("offset", pa.int32(), "the first token of the row that stands for it"),
        Column("num_tokens", pa.int32(), "how many tokens stand for it"),
        Column("digest", pa.string(), "the image's digest in table images"),
        Column("names", NAMES, "its tensors' names; none where an earlier row or place has the image"),
        Column("dtypes", NAMES, "the type of each tensor's values"),
        Column("shapes", list_of(SHAPE), "the shape of each tensor"),
        Column("data", list_of(pa.binary()), "the values of each tensor"),
    ),
    row_by_row=True,
)
UPDATES = Table(
    "updates",
    "one optimizer step: from which policy to which, and what it measured",
    ("version", "update"),
    (
        Column("version", pa.int64(), "the policy version made: its step plus one"),
        Column("update", pa.int32(), "the optimizer step within the batch; 0-based"),
        Column("policy_key_in", pa.string(), "the policy trained from"),
        Column("weights_sha256_in", pa.string(), "digest of the weights trained from"),
        Column("weights_sha256", pa.string(), "digest of the weights made, over names, types, shapes and bytes"),
        Column("learning_rate", pa.float64(), "of this step"),
        Column("loss", pa.float64(), "total loss"),
        Column("rl_loss", pa.float64(), "rl component, normalised by rl_tokens"),
        Column("ce_loss", pa.float64(), "cross-entropy component, normalised by ce_tokens"),
        Column("ref_kl_loss", pa.float64(), "reference-KL component, normalised by ref_kl_tokens"),
        Column("grad_norm", pa.float64(), "before clipping"),
        Column("entropy", pa.float64(), "mean over rl tokens, nats", True),
        Column("mismatch_kl", pa.float64(), "mean over rl tokens of r - 1 - log r, engine against learner", True),
        Column("mismatch_kl_max", pa.float64(), "maximum of the same", True),
        Column("masked_fraction", pa.float64(), "share of rl tokens outside the trust region", True),
        Column("num_rows", pa.int64(), "packed rows"),
        Column("num_tokens", pa.int64(), "tokens in packed rows"),
        Column("rl_tokens", pa.int64(), "denominator of the rl component"),
        Column("ce_tokens", pa.int64(), "denominator of the cross-entropy component"),
        Column("ref_kl_tokens", pa.int64(), "denominator of the reference-KL component"),
        Column("has_optimizer", pa.bool_(), "whether optimizer state was saved with the policy"),
        Column("metrics", pa.string(), "further metrics as JSON"),
    ),
)
TOKEN_STATISTICS = Table(
    "token_statistics",
    "what the learner measured on the tokens of one sample",
    ("sample_id",),
    (
        Column("sample_id", pa.string(), "the sample"),
        Column("logprobs", FLOATS, "per token: the learner's log-prob before the update; 0 where nothing has weight"),
        Column("entropies", FLOATS, "per token: the learner's entropy in nats; 0 where nothing has weight"),
    ),
    aligned=("logprobs", "entropies"),
    logprobs=("logprobs",),
)
TOKEN_MASKS = Table(
    "token_masks",
    "which tokens the rl loss gave no gradient of their surrogate; only of steps and samples where there were any",
    ("sample_id",),
    (
        Column("sample_id", pa.string(), "the sample"),
        Column("masked", FLAGS, "per token: outside the trust region, clipped, or in a sequence that was left out"),
    ),
)
TURNS = Table(
    "turns",
    "what the engine answered to one model call of a rollout that has not ended (`rollout.keep_turns`); no stage reads "
    "it, and it goes when the rollout's group is committed",
    ("assignment_id", "request"),
    (
        Column("group_id", pa.string(), "its group"),
        Column("assignment_id", pa.string(), "the assignment of the rollout"),
        Column("request", pa.string(), "digest of what was asked: tokens, sampling parameters, model"),
        Column("answer", pa.string(), "the answer as it came, as JSON"),
        Column("policies", NAMES, "the policies that sampled it; empty where a frozen model did"),
    ),
)
POLICIES = Table(
    "policies",
    "one version of the weights: a complete directory or absent",
    ("policy_key",),
    (
        Column("policy_key", pa.string(), "the key of the training that made it, or of the import"),
        Column("version", pa.int64(), "0 is the run's first policy; training at step k makes version k + 1"),
        Column("parent_key", pa.string(), "the policy it was trained from; null for an import", True),
        Column("weights_sha256", pa.string(), "digest of the weights, over names, types, shapes and bytes"),
        Column("has_optimizer", pa.bool_(), "whether optimizer state lies beside the weights"),
        Column("probe_token_ids", TOKENS, "a fixed token sequence"),
        Column("probe_logprobs", FLOATS, "the learner's log-prob of each of its tokens given those before; first is 0"),
    ),
    aligned=("probe_token_ids", "probe_logprobs"),
    logprobs=("probe_logprobs",),
)
REGRADES = Table(
    "regrades",
    "one recorded trace scored again with the environment's reward functions of today, beside what it had",
    ("trace_id",),
    (
        Column("trace_id", pa.string(), "the trace"),
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "the example tried"),
        Column("reward_before", pa.float64(), "recorded total reward; null where scoring did not run", True),
        Column("reward", pa.float64(), "total reward now; null where scoring did not run or failed", True),
        Column("rewards_before", pa.string(), "recorded named rewards as JSON"),
        Column("rewards", pa.string(), "named rewards now as JSON"),
        Column("changed", pa.bool_(), "whether the total reward is another, or appeared or went"),
        Column("error_type", pa.string(), "what scoring raised now; null where it did not", True),
        Column("error_message", pa.string(), "its text", True),
        Column("seconds", pa.float64(), "wall-clock of scoring now"),
    ),
)
DECISIONS = Table(
    "decisions",
    "one decision at a gate: whether a step's batch goes on to training",
    ("gate",),
    (
        Column("gate", pa.string(), "pause (a person decides) or rule"),
        Column("approved", pa.bool_(), "whether the batch goes on"),
        Column("rule", pa.string(), "the rule in SQL; null where a person decided", True),
        Column("decided_by", pa.string(), "rule, or the person's name as given"),
        Column("reason", pa.string(), "what was said or found"),
        Column("figures", pa.string(), "the batch's figures that were shown or asked, as JSON"),
        Column("asked_at", MOMENT, "when the decision was asked for"),
        Column("decided_at", MOMENT, "when it was made"),
    ),
)

REFERENCES = Table(
    "references",
    "what a frozen reference, or the policy shown a demonstration, gave the sampled tokens of one message",
    ("trace_id", "message"),
    (
        Column("trace_id", pa.string(), "the trace"),
        Column("message", pa.int32(), "the node's number in the trace"),
        Column("logprobs", FLOATS, "per token of the message: the reference's log-prob; 0 where it was not scored"),
    ),
    logprobs=("logprobs",),
)
ESTIMATOR_STATES = Table(
    "estimator_states",
    "what a stateful estimator of advantages remembers of one example and agent after a step",
    ("environment", "example_id", "agent"),
    (
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "the example; empty where the estimator keeps none apart"),
        Column("agent", pa.string(), "the agent's seat; empty where the estimator keeps none apart"),
        Column("values", NUMBERS, "what the estimator keeps, in its own order"),
        Column("num_traces", pa.int64(), "kept rewarded traces that went into it, of all steps"),
    ),
)
DIFFICULTIES = Table(
    "difficulties",
    "how hard an example was for the policy when it was tried last",
    ("environment", "example_id"),
    (
        Column("environment", pa.string(), "the environment's name in this run"),
        Column("example_id", pa.string(), "the example"),
        Column("reward", pa.float64(), "mean reward of the last group's trainable traces that were scored"),
        Column("num_groups", pa.int64(), "groups of it that were scored, of all steps"),
    ),
)
METRICS = Table(
    "metrics",
    "one number of a finished step; what is shown or exported of steps is read from here",
    ("scope", "name"),
    (
        Column("scope", pa.string(), "the environment's name in this run, all of them together, or empty: of the step"),
        Column("name", pa.string(), "the measure without its scope: reward/mean, update/loss"),
        Column("value", pa.float64(), "the number; NaN and infinities are kept as they are"),
    ),
)

STAGE_TABLES = (
    EXAMPLES,
    ASSIGNMENTS,
    TRACES,
    MESSAGES,
    TOKEN_POLICIES,
    TURNS,
    IMAGES,
    IMAGE_TENSORS,
    ENGINE_METRICS,
    INTAKES,
    STALE_GROUPS,
    INTAKE_LOADS,
    VERDICTS,
    SAMPLES,
    BATCHES,
    BATCH_IMAGES,
    UPDATES,
    TOKEN_STATISTICS,
    TOKEN_MASKS,
    POLICIES,
    REGRADES,
    DECISIONS,
    REFERENCES,
    ESTIMATOR_STATES,
    DIFFICULTIES,
    METRICS,
)

TABLES = {table.name: table for table in (*STAGE_TABLES, *SYSTEM_TABLES)}

GROUPS = (TRACES.name, "group_id")
"""The table and the column that name the groups of a part of rollouts."""

"""Tables that the learner's stages make: what every optimizer step measured, and the policies."""

import pyarrow as pa

from storage.schemas.columns import FLAGS, FLOATS, TOKENS, Column, Table

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

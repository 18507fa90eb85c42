"""The tables that stages write, read from `stage_tables.sql`, and the list of all tables.

A stage hands over tables with exactly the `arrow` schema of its tables; storage adds the slice columns, checks the
whole against `stored` and refuses anything else, because Delta Lake casts in silence (7.5 becomes 7).
"""

from storage.schemas.contract import read_tables
from storage.schemas.system_tables import SYSTEM_TABLES

WEIGHTS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")
STAGE_TABLES = read_tables(
    "stage_tables.sql",
    {
        "messages": {
            "aligned": ("token_ids", "mask", "logprobs"),
            "aligned_or_empty": ("is_content",),
            "logprobs": ("logprobs",),
            "only_where": (("mask", "sampled"),),
        },
        "samples": {"aligned": WEIGHTS},
        "batches": {
            "aligned": ("token_ids", "logprobs", "temperatures", *WEIGHTS),
            "logprobs": ("logprobs",),
            "row_by_row": True,
        },
        "batch_images": {"row_by_row": True},
        "batch_experts": {"row_by_row": True},
        "token_statistics": {"aligned": ("logprobs", "entropies"), "logprobs": ("logprobs",)},
        "policies": {"aligned": ("probe_token_ids", "probe_logprobs"), "logprobs": ("probe_logprobs",)},
        "references": {"logprobs": ("logprobs",)},
    },
)
TABLES = {table.name: table for table in (*STAGE_TABLES, *SYSTEM_TABLES)}

(
    EXAMPLES,
    ASSIGNMENTS,
    TRACES,
    MESSAGES,
    TOKEN_POLICIES,
    ROUTED_EXPERTS,
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
    BATCH_EXPERTS,
    UPDATES,
    TOKEN_STATISTICS,
    TOKEN_MASKS,
    POLICIES,
    JUDGEMENTS,
    REGRADES,
    DECISIONS,
    REFERENCES,
    ESTIMATOR_STATES,
    DIFFICULTIES,
    METRICS,
) = STAGE_TABLES

GROUPS = (TRACES.name, "group_id")
"""The table and the column that name the groups of a part of rollouts."""

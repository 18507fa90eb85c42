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
        "token_statistics": {"aligned": ("logprobs", "entropies"), "logprobs": ("logprobs",)},
        "policies": {"aligned": ("probe_token_ids", "probe_logprobs"), "logprobs": ("probe_logprobs",)},
        "references": {"logprobs": ("logprobs",)},
    },
)
TABLES = {table.name: table for table in (*STAGE_TABLES, *SYSTEM_TABLES)}

EXAMPLES = TABLES["examples"]
ASSIGNMENTS = TABLES["assignments"]
TRACES = TABLES["traces"]
MESSAGES = TABLES["messages"]
TOKEN_POLICIES = TABLES["token_policies"]
IMAGES = TABLES["images"]
IMAGE_TENSORS = TABLES["image_tensors"]
ENGINE_METRICS = TABLES["engine_metrics"]
INTAKES = TABLES["intakes"]
STALE_GROUPS = TABLES["stale_groups"]
INTAKE_LOADS = TABLES["intake_loads"]
VERDICTS = TABLES["verdicts"]
SAMPLES = TABLES["samples"]
BATCHES = TABLES["batches"]
BATCH_IMAGES = TABLES["batch_images"]
UPDATES = TABLES["updates"]
TOKEN_STATISTICS = TABLES["token_statistics"]
TOKEN_MASKS = TABLES["token_masks"]
TURNS = TABLES["turns"]
POLICIES = TABLES["policies"]
REGRADES = TABLES["regrades"]
DECISIONS = TABLES["decisions"]
REFERENCES = TABLES["references"]
ESTIMATOR_STATES = TABLES["estimator_states"]
DIFFICULTIES = TABLES["difficulties"]
METRICS = TABLES["metrics"]

GROUPS = (TRACES.name, "group_id")
"""The table and the column that name the groups of a part of rollouts."""

"""A store written row by row: one step of one run, whose tokens have known values of everything there is to know."""

from datetime import UTC, datetime, timedelta
from itertools import accumulate

from configs.run import RunConfig, View
from flows.queries.store_reader import StoreReader
from storage.refs import Entry
from storage.schemas.stage_tables import UPDATES
from storage.store import open_store
from tasks.metrics import stage as metrics
from tests.fixtures import builders
from tests.fixtures.stages import Call

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")
STAGES = {
    "rollout": (("traces", "messages", "images", "token_policies"), ()),
    "filtering": (("verdicts",), ("rollout",)),
    "reference": (("references",), ("rollout", "filtering")),
    "advantage": (("samples",), ("rollout", "filtering", "reference")),
    "packing": (("batches",), ("advantage", "rollout")),
    "training": (("updates", "token_statistics", "token_masks"), ("packing",)),
}
"""The tables that each stage writes, the first of which it cannot do without, and the stages that it reads."""
RUN = "hand"
PARTLY = "70617274" * 4
"""The key of the work that is not finished."""
FORKED = "f" * 32
"""A trace of two branches, which share their first message; 0-1-2-3 and 0-4."""
PATHS = ((0, 1, 2, 3), (0, 4))


def forked():
    """The messages of the forked trace: 3 + 3 + 1 + 2 tokens on one way, 3 + 2 on the other."""
    partly = {"mask": [False, True, True], "logprobs": [0.0, -1.0, -2.0], "is_content": [False, True, True]}
    return [
        builders.message(FORKED, 0, tokens=(1, 2, 3)),
        builders.message(FORKED, 1, parent=0, tokens=(4, 5, 6), sampled=True, **partly),
        builders.message(FORKED, 2, parent=1, tokens=(7,)),
        builders.message(FORKED, 3, parent=2, tokens=(8, 9), sampled=True, logprobs=[-0.5, -0.25]),
        builders.message(FORKED, 4, parent=0, tokens=(10, 11), sampled=True),
    ]


def credit(trace_id, branch, path, streams):
    """A row of credits; streams that are not given are zeros."""
    (length,) = {len(values) for values in streams.values()}
    row = {"sample_id": f"{trace_id}/{branch}", "trace_id": trace_id, "branch": branch, "group_id": "g0"}
    row |= {"path": list(path), "reward": 1.0, "baseline": 0.5, "advantage": 0.5, "num_tokens": length}
    return row | {name: list(streams.get(name, [0.0] * length)) for name in STREAMS}


def trained_fork():
    """Credits of both branches of the forked trace: 0.5 for the first reply, -0.25 for the one of the other branch."""
    first = {"advantages": [0] * 4 + [0.5] * 2 + [0] * 3, "rl_weights": [0] * 4 + [1] * 2 + [0] * 3}
    second = {"advantages": [0, 0, 0, -0.25, -0.25], "rl_weights": [0, 0, 0, 1, 1]}
    return [credit(FORKED, 0, PATHS[0], first), credit(FORKED, 1, PATHS[1], second)]


def batch(credits, row=0, scale=1.0, **columns):
    """A row of batches: of rows of credits with their weights, those of rl scaled, and columns that a test looks at."""
    offsets = [0, *accumulate(len(credit["rl_weights"]) for credit in credits)]
    # The first token of a sample has no weight in its batch.
    packed = {
        name: [value * (place > 0) for credit in credits for place, value in enumerate(credit[name])]
        for name in STREAMS
    }
    packed |= dict.fromkeys(("logprobs", "temperatures"), [0.0] * offsets[-1]) | {"token_ids": [1] * offsets[-1]}
    packed |= {"rl_weights": [weight * scale for weight in packed["rl_weights"]], "cu_seqlens": offsets}
    packed |= dict.fromkeys(("rl_tokens", "ce_tokens", "ref_kl_tokens"), 1)
    packed |= dict.fromkeys(("update", "rank", "micro_step"), 0)
    return packed | {"row": row, "sample_ids": [credit["sample_id"] for credit in credits]} | columns


def update(**changes):
    """A row of updates."""
    kinds = {field.name: field.type for field in UPDATES.arrow}
    row = {name: "" if str(kind) == "string" else 0 for name, kind in kinds.items()}
    return row | {"version": 1, "metrics": "{}", "has_optimizer": False, "policy_key_in": "policy"} | changes


class HandMade:
    """Writes the work of one step, stage by stage: each takes what the one before made."""

    def __init__(self, root):
        self.store = open_store(root)
        config = RunConfig(name=RUN, store=str(root), seed=1).model_dump(mode="json")
        self.store.runs.record(run=RUN, event="started", kind="train", config=config)

    @property
    def reader(self):
        """A new reader of the store, as it is now."""
        return StoreReader.at(self.store.root.address)

    def work(self, stage, tables, step=0, minutes=0, part="", **inputs):
        """Write the rows of one piece of work, or a part of it, and its entry in the ledger; return its key.

        Work that ends minutes later has another key.
        """
        key = PARTLY if part else f"{stage}{step}{minutes or ''}".encode().hex().ljust(32, "0")[:32]
        made = [
            self.store.append(name, builders.table(name, rows), run=RUN, step=step, key=key, attempt=key + part)
            for name, rows in tables.items()
        ]
        at = NOW + timedelta(minutes=minutes)
        entry = Entry(RUN, step, stage, 1, key, part, key + part, {"x": 1}, inputs, tuple(made), at, at)
        return self.store.ledger.commit(entry).key

    def step(self, traces, messages, samples=(), step=0, **more):
        """Write a step as far as there are rows for it; `more` are batches, updates and the like. Return the keys."""
        rows = {"traces": traces, "messages": messages, "samples": samples, **more}
        rows["verdicts"] = [builders.verdict(str(trace["trace_id"])) for trace in traces]
        keys = {}
        for stage, (names, inputs) in STAGES.items():
            if rows.get(names[0]):
                tables = {name: rows[name] for name in names if name in rows}
                keys[stage] = self.work(stage, tables, step, **{name: keys[name] for name in inputs if name in keys})
        known = {sample["sample_id"] for sample in samples}
        read = {"messages", "verdicts", "samples", "batches", "updates"}  # statistics are of single samples here
        if not known.issuperset(sample for row in more.get("batches", ()) for sample in row["sample_ids"]):
            read -= {"batches"}  # others' samples stand between those that are looked at
        made = {name: builders.table(name, rows[name]) for name in read if rows.get(name)}
        made["traces"] = builders.table("traces", traces)
        written = Call(metrics.STAGE)(made, View(RunConfig(), metrics.STAGE.sections, "metrics"), 1)["metrics"]
        self.work(
            "metrics", {"metrics": written.to_pylist()}, step, **{k: v for k, v in keys.items() if k != "reference"}
        )
        return keys

"""A store written row by row: one step of one run, whose tokens have known values of everything there is to know."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.run import RunConfig, View
from storage.refs import Entry
from storage.schemas.stage_tables import UPDATES
from storage.store import Store, open_store
from tasks.metrics import stage as metrics
from tasks.runtime.stage import Tables
from tests.fixtures import builders
from tests.fixtures.stages import Call

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Rows = Sequence[Mapping[str, Any]]
RUN = "hand"
FORKED = "f" * 32
"""A trace of two branches, which share their first message; 0-1-2-3 and 0-4."""
PATHS = ((0, 1, 2, 3), (0, 4))


def forked() -> list[dict[str, Any]]:
    """The messages of the forked trace: 3 + 3 + 1 + 2 tokens on one way, 3 + 2 on the other."""
    partly = {"mask": [False, True, True], "logprobs": [0.0, -1.0, -2.0], "is_content": [False, True, True]}
    return [
        builders.message(FORKED, 0, tokens=(1, 2, 3)),
        builders.message(FORKED, 1, parent=0, tokens=(4, 5, 6), sampled=True, **partly),
        builders.message(FORKED, 2, parent=1, tokens=(7,)),
        builders.message(FORKED, 3, parent=2, tokens=(8, 9), sampled=True, logprobs=[-0.5, -0.25]),
        builders.message(FORKED, 4, parent=0, tokens=(10, 11), sampled=True),
    ]


def credit(trace_id: str, branch: int, path: Sequence[int], streams: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A row of credits; streams that are not given are zeros."""
    (length,) = {len(values) for values in streams.values()}
    names = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    row = {"sample_id": f"{trace_id}/{branch}", "trace_id": trace_id, "branch": branch, "group_id": "g0"}
    row |= {"path": list(path), "reward": 1.0, "baseline": 0.5, "advantage": 0.5, "num_tokens": length}
    return row | {name: list(streams.get(name, [0.0] * length)) for name in names}


def batch(samples: Sequence[str | Mapping[str, Any]], row: int = 0, scale: float = 1.0) -> dict[str, Any]:
    """A row of batches: of rows of credits with their weights, those of rl scaled; of an id alone one weightless token.

    What else stands in its tokens is not looked at here.
    """
    names = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    alone = {name: [0.0] for name in names}
    credits = [{"sample_id": each, **alone} if isinstance(each, str) else each for each in samples]
    borders = [0]
    for each in credits:
        borders.append(borders[-1] + len(each["rl_weights"]))
    packed: dict[str, Any] = {"row": row, "update": 0, "rank": 0, "micro_step": 0}
    packed |= {"sample_ids": [each["sample_id"] for each in credits]}
    packed |= {"cu_seqlens": borders, "token_ids": [1] * borders[-1]}
    packed |= {name: [0.0] * borders[-1] for name in ("logprobs", "temperatures")}
    packed |= {
        name: [value for each in credits for value in [0.0, *each[name][1:]][: len(each[name])]] for name in names
    }
    packed["rl_weights"] = [value * scale for value in packed["rl_weights"]]
    return packed | {"rl_tokens": 1, "ce_tokens": 1, "ref_kl_tokens": 1}


def update(**changes: Any) -> dict[str, Any]:
    """A row of updates."""
    kinds = {field.name: field.type for field in UPDATES.arrow}
    row: dict[str, Any] = {name: "" if str(kind) == "string" else 0 for name, kind in kinds.items()}
    return row | {"version": 1, "metrics": "{}", "has_optimizer": False, "policy_key_in": "policy"} | changes


class HandMade:
    """Writes the work of one step, stage by stage: each takes what the one before made."""

    def __init__(self, root: Path) -> None:
        self.store: Store = open_store(root)
        config = RunConfig(name=RUN, store=str(root), seed=1).model_dump(mode="json")
        self.store.runs.record(run=RUN, event="started", kind="train", config=config)

    def work(self, stage: str, tables: Mapping[str, Rows], step: int = 0, **inputs: str) -> str:
        """Write the rows of one piece of work and its entry in the ledger; return its key."""
        key = f"{stage}{step}".encode().hex().ljust(32, "0")[:32]
        attempt = f"attempt-{stage}-{step}"
        made = [
            self.store.append(name, builders.table(name, rows), run=RUN, step=step, key=key, attempt=attempt)
            for name, rows in tables.items()
        ]
        entry = Entry(RUN, step, stage, 1, key, "", attempt, {"x": 1}, inputs, tuple(made), NOW, NOW)
        return self.store.ledger.commit(entry).key

    def step(self, traces: Rows, messages: Rows, samples: Rows = (), step: int = 0, **more: Rows) -> dict[str, str]:
        """Write a step as far as there are rows for it; `more` are batches, updates and the like. Return the keys."""
        sampled = {"traces": traces, "messages": messages}
        sampled |= {name: more[name] for name in ("images", "token_policies") if name in more}
        keys = self._stages(traces, sampled, samples, step, more)
        rows = {"traces": traces, "messages": messages, "verdicts": _verdicts(traces), "samples": samples, **more}
        known = {sample["sample_id"] for sample in samples}
        read = {"messages", "verdicts", "samples", "batches", "updates"}  # statistics are of single samples here
        if not known.issuperset(sample for row in more.get("batches", ()) for sample in row["sample_ids"]):
            read -= {"batches"}  # others' samples stand between those that are looked at
        made = {name: builders.table(name, own) for name, own in rows.items() if own and name in read}
        of_step = {name: key for name, key in keys.items() if name != "reference"}
        self.measure(made | {"traces": builders.table("traces", traces)}, step, **of_step)
        return keys

    def measure(self, tables: Tables, step: int = 0, **inputs: str) -> str:
        """Write the metrics of a step as its stage makes them out of some tables; return the key."""
        view = View(RunConfig(), metrics.STAGE.sections, "metrics")
        rows = Call(metrics.STAGE)(tables, view, 1)["metrics"].to_pylist()
        return self.work("metrics", {"metrics": rows}, step, **inputs)

    def _stages(
        self, traces: Rows, sampled: Mapping[str, Rows], samples: Rows, step: int, more: Mapping[str, Rows]
    ) -> dict[str, str]:
        keys = {"rollout": self.work("rollout", sampled, step)}
        keys["filtering"] = self.work("filtering", {"verdicts": _verdicts(traces)}, step, rollout=keys["rollout"])
        if "references" in more:
            keys["reference"] = self.work("reference", {"references": more["references"]}, step, **keys)
        if not samples:
            return keys
        keys["advantage"] = self.work("advantage", {"samples": samples}, step, **keys)
        if "batches" in more:
            above = {"advantage": keys["advantage"], "rollout": keys["rollout"]}
            keys["packing"] = self.work("packing", {"batches": more["batches"]}, step, **above)
        if "updates" in more:
            learnt = {name: more[name] for name in ("updates", "token_statistics", "token_masks") if name in more}
            keys["training"] = self.work("training", learnt, step, packing=keys["packing"])
        return keys


def _verdicts(traces: Rows) -> list[dict[str, Any]]:
    return [builders.verdict(str(trace["trace_id"])) for trace in traces]

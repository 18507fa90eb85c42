"""The packed batch of a step: rows as bars of their samples, what the updates measured, what decided about it."""

import json
from typing import Any

import polars as pl

from flows.viewer import addresses
from flows.viewer.data import batch as data
from flows.viewer.data.retired import retired
from flows.viewer.data.run_states import is_going
from flows.viewer.library import Library
from flows.viewer.page import Asked, Crumb, Page
from flows.views.identify import policy_names, policy_version
from flows.views.recorded_rows import MEASURES

COLOURS = ("advantage", "reward", "sample", "environment")
"""By what samples are coloured."""
MOST_ROWS, MOST_SAMPLES = 100, 2000
"""What a page shows at most; of samples about so many, and a row at least."""
MEASURED = (*MEASURES, "mismatch_kl_max")
DENOMINATORS = {"rl_tokens": "RL tokens", "ce_tokens": "CE tokens", "ref_kl_tokens": "Ref-KL tokens"}
"""Tokens of an update that each component weighs, and is divided by; with what they are called."""


def page(library: Library, asked: Asked) -> Page:
    """Return the batch of a step. Raises NotThere where it has none."""
    run, step = asked.path["run"], asked.place("step")
    of = data.packed(library, run, step)
    rows = data.rows(library, of)
    size = rows_per_page(rows)
    start = asked.number("page", 0, most=max(len(rows) - 1, 0) // size) * size
    shown = drawn_rows(library, of, rows.slice(start, size))
    values = {
        "run": run,
        "step": step,
        **(told := overview(library, of)),
        "colour": asked.one_of("colour", COLOURS, "sample" if told["largest"] is None else "advantage"),
        "colours": COLOURS,
        "updates": _updates(library, of, rows),
        "rows": shown,
        "denominators": DENOMINATORS,
        "measures": MEASURED,
        "decisions": [_decision(each) for each in data.decisions(library, of)],
        "first_row": start,
        "page_number": start // size,
        "num_pages": -(-len(rows) // size),
        **neighbours(data.steps(library, run), step),
    }
    return Page("batch.html", "Batch", values, crumbs(run, step), live=may_change(library, of))


def rows_per_page(rows: pl.DataFrame) -> int:
    """Return how many rows of a batch a page shows: fewer where each holds many samples, as each is a link."""
    samples = int(rows["num_samples"].sum())
    return max(1, min(MOST_ROWS, MOST_SAMPLES * len(rows) // max(samples, 1)))


def may_change(library: Library, of: data.Packed) -> bool:
    """Say whether the batch may still be trained: its run goes on."""
    return of.updates is None and is_going(library.store.runs.events(of.run)[-1])


def crumbs(run: str, step: int) -> tuple[Crumb, ...]:
    """Return the way to the batch of a step."""
    return Crumb(run, addresses.run(run)), Crumb(f"step {step}", addresses.step(run, step))


def neighbours(known: list[int], here: int) -> dict[str, int | None]:
    """Return the numbers before and after one among those known; None at the ends."""
    before, after = [each for each in known if each < here], [each for each in known if each > here]
    return {"previous": max(before, default=None), "next": min(after, default=None)}


def overview(library: Library, of: data.Packed) -> dict[str, Any]:
    """Return what is told of a batch as a whole."""
    rows, samples = data.rows(library, of), data.samples(library, of)
    tokens = int(rows["num_tokens"].sum())
    return {
        "state": _state(library, of),
        "policy": _policy(library, of),
        "key": of.batches.key,
        "retired": retired(library, (of.batches, *of.credits, *of.traces, of.updates)),
        "computed_by": of.batches.computed_by,
        "capacity": of.capacity,
        "num_rows": len(rows),
        "num_padding": int((rows["num_samples"] == 0).sum()),
        "num_samples": len(samples),
        "num_traces": samples["trace_id"].n_unique(),
        "num_tokens": tokens,
        "fill": rows["fill"].mean(),
        "environments": _environments(samples),
        "largest": _largest(samples),
        "rewards": [samples["reward"].min(), samples["reward"].max()],
    }


def _largest(samples: pl.DataFrame) -> float | None:
    """Return the advantage furthest from 0 of all samples, by its size; None where none has one."""
    largest = samples["advantage"].abs().max()
    return None if largest is None else float(largest)  # type: ignore[arg-type]


def _environments(samples: pl.DataFrame) -> list[str]:
    return sorted(samples["environment"].drop_nulls().unique().to_list())


def _state(library: Library, of: data.Packed) -> str:
    """Say how far the batch has come."""
    if of.updates:
        return "trained" if of.updates.finished else "being trained"
    decided = data.decisions(library, of)
    return "refused" if decided and not decided[-1]["approved"] else "packed, not trained"


def _policy(library: Library, of: data.Packed) -> dict[str, Any] | None:
    """Return which policy training made of which; None before training."""
    if of.updates is None:
        return None
    version = policy_version(of.updates)
    before = library.graph.works.get(of.updates.inputs.get("policy", ""))
    names = policy_names(before) if before else []
    own = [name for name in names if name.rpartition(":")[0] == of.run]
    return {
        "made": f"{of.run}:{version}",
        "version": version,
        "key": of.updates.key,
        "from": next(iter((*own, *names)), None),
    }


def drawn_rows(library: Library, of: data.Packed, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows of a batch with their samples, ready to be drawn."""
    wanted = rows["row"].to_list()
    own = data.samples(library, of).filter(pl.col("row").is_in(wanted))
    environments = _environments(data.samples(library, of))
    by_row: dict[int, list[dict[str, Any]]] = {}
    for each in own.to_dicts():
        by_row.setdefault(each["row"], []).append(shown_sample(of.run, environments, each))
    plain = rows.drop("sample_ids", "cu_seqlens", *DENOMINATORS).to_dicts()
    return [{**row, "samples": by_row.get(row["row"], [])} for row in plain]


def shown_sample(run: str, environments: list[str], sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the address of its trace and the place of its environment among those of the batch."""
    environment = sample["environment"]
    return {
        **sample,
        "of_environment": environments.index(environment) if environment in environments else None,
        "address": trace_of(run, sample),
    }


def trace_of(run: str, sample: dict[str, Any]) -> str | None:
    """Return the address of the trace that a sample is of, at its branch; None where the trace is not there."""
    if not sample["trace_id"]:
        return None
    branch = str(sample["branch"]) if sample["branch"] else ""
    return addresses.trace(run, sample["trace_id"], sample["key"] or "", branch=branch)


def _updates(library: Library, of: data.Packed, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the updates of a batch with their denominators, what is in their rows, and what was measured."""
    measured = {each["update"]: each for each in data.updates(library, of).to_dicts()}
    own = rows.group_by("update", maintain_order=True).agg(
        pl.col(*DENOMINATORS).first(),
        num_rows=pl.len().cast(pl.Int64),
        num_ranks=pl.col("rank").n_unique().cast(pl.Int64),
        num_tokens=pl.col("num_tokens").sum(),
    )
    return [
        {"number": row.pop("update"), **row, "measured": _measured(measured.get(number))}
        for number, row in zip(own["update"], own.to_dicts(), strict=True)
    ]


def _measured(update: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what the learner measured, its further metrics beside; None before training."""
    if update is None:
        return None
    return {name: update[name] for name in MEASURED} | {"further": json.loads(update["metrics"] or "{}")}


def _decision(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "figures": json.loads(row["figures"])}

"""The packed batch of a step, and one of its rows.

A batch is rows as bars of their samples, what the updates measured and what decided about it; a row its samples, what
each weighs, and its tokens as the learner was given them.
"""

import json
from itertools import accumulate
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.batch import PackedStep, decisions, packed_step, row_samples, steps, texts, updates
from flows.queries.compare_rows import MEASURES
from flows.queries.reader import read_rollouts, reply_heads, sorted_rows
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.rollouts import traces_of
from flows.queries.row_lineage import policy_names, policy_version
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows, has_lost_rows
from flows.reporting.svg import diverging, sequential
from flows.viewer import addresses
from flows.viewer.addresses import Crumb, Page
from flows.viewer.pages.step import neighbours

COLOURS = ("advantage", "reward", "sample", "environment")
"""By what samples are coloured."""
MOST_ROWS, MOST_SAMPLES = 100, 2000
"""What a page shows at most; of samples about so many, and a row at least."""
MEASURED = (*MEASURES, "mismatch_kl_max")
DENOMINATORS = {"rl_tokens": "RL tokens", "ce_tokens": "CE tokens", "ref_kl_tokens": "Ref-KL tokens"}
"""Tokens of an update that each component weighs, and is divided by; with what they are called."""


def batch_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the batch of a step. Raises NotThere where it has none."""
    run, step = asked.path["run"], asked.required_number("step")
    of = packed_step(library, run, step)
    rows = batch.rows(library, of)
    size = rows_per_page(rows)
    start = asked.number("page", 0, most=max(len(rows) - 1, 0) // size) * size
    values = {
        "run": run,
        "step": step,
        **(summary := overview(library, of)),
        "read": read_rollouts(library, run, sorted_rows(packed_traces(library, of), asked), asked),
        "colour": asked.one_of("colour", COLOURS, "sample" if summary["largest"] is None else "advantage"),
        "colours": COLOURS,
        "updates": _updates(library, of, rows),
        "rows": drawn_rows(library, of, rows.slice(start, size)),
        "denominators": DENOMINATORS,
        "measures": MEASURED,
        "decisions": [{**each, "figures": json.loads(each["figures"])} for each in decisions(library, of)],
        "first_row": start,
        "page_number": start // size,
        "num_pages": -(-len(rows) // size),
        **neighbours(steps(library, run), step),
    }
    return Page("batch.html", "Batch", values, crumbs(run, step), live=may_change(library, of))


def packed_traces(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return the traces that the samples of a batch are of, with columns as in `flows.queries.rollouts.traces`."""
    own = [each for each in library.history(of.run).lineages if each.batches and each.batches.key == of.batches.key]
    packed = batch.samples(library, of)["trace_id"].unique()
    return traces_of(library, of.run, own).filter(pl.col("trace_id").is_in(packed.implode()))


def rows_per_page(rows: pl.DataFrame) -> int:
    """Return how many rows of a batch a page shows: fewer where each holds many samples, as each is a link."""
    samples = int(rows["num_samples"].sum())
    return max(1, min(MOST_ROWS, MOST_SAMPLES * len(rows) // max(samples, 1)))


def may_change(library: StoreReader, of: PackedStep) -> bool:
    """Say whether the batch may still be trained: its run goes on."""
    return of.updates is None and any_going(library, of.run)


def crumbs(run: str, step: int) -> tuple[Crumb, ...]:
    """Return the way to the batch of a step."""
    return Crumb(run, addresses.run(run)), Crumb(f"step {step}", addresses.step(run, step))


def overview(library: StoreReader, of: PackedStep) -> dict[str, Any]:
    """Return the summary of a batch as a whole."""
    rows, samples = batch.rows(library, of), batch.samples(library, of)
    return {
        "state": _state(library, of),
        "policy": _policy(library, of),
        "key": of.batches.key,
        "retired": expired_rows(library, (of.batches, *of.samples, *of.traces, of.updates)),
        "computed_by": of.batches.computed_by,
        "capacity": of.capacity,
        "num_rows": len(rows),
        "num_padding": int((rows["num_samples"] == 0).sum()),
        "num_samples": len(samples),
        "num_traces": samples["trace_id"].n_unique(),
        "num_tokens": int(rows["num_tokens"].sum()),
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


def _state(library: StoreReader, of: PackedStep) -> str:
    """Say how far the batch has come."""
    if of.updates:
        return "trained" if of.updates.finished else "being trained"
    decided = decisions(library, of)
    return "refused" if decided and not decided[-1]["approved"] else "packed, not trained"


def _policy(library: StoreReader, of: PackedStep) -> dict[str, Any] | None:
    """Return which policy training made of which; None before training."""
    if of.updates is None:
        return None
    version = policy_version(of.updates)
    before = library.graph.works.get(of.updates.inputs.get("policy", ""))
    names = policy_names(before) if before else []
    # A policy has a name in every run that shares it; that of this run says most.
    own = [name for name in names if name.rpartition(":")[0] == of.run]
    return {
        "made": f"{of.run}:{version}",
        "version": version,
        "key": of.updates.key,
        "from": next(iter((*own, *names)), None),
    }


def drawn_rows(library: StoreReader, of: PackedStep, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows of a batch with their samples, ready to be drawn."""
    # The samples of the shown rows alone: a batch may hold a hundred thousand.
    wanted = rows["row"].to_list()
    own = batch.samples(library, of).filter(pl.col("row").is_in(wanted))
    heads = reply_heads(library, own.drop_nulls("key"))
    environments = _environments(batch.samples(library, of))
    by_row: dict[int, list[dict[str, Any]]] = {}
    for each in own.to_dicts():
        by_row.setdefault(each["row"], []).append(
            {**shown_sample(of.run, environments, each), "said": heads.get(each["trace_id"])}
        )
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


def _updates(library: StoreReader, of: PackedStep, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the updates of a batch with their denominators, what is in their rows, and what was measured."""
    measured = {each["update"]: each for each in updates(library, of).to_dicts()}
    own = rows.group_by("update", maintain_order=True).agg(
        pl.col(*DENOMINATORS).first(),
        num_rows=pl.len().cast(pl.Int64),
        num_ranks=pl.col("rank").n_unique().cast(pl.Int64),
        num_tokens=pl.col("num_tokens").sum(),
    )
    return [
        {"number": row.pop("update"), **row, "measured": _update_values(measured.get(number))}
        for number, row in zip(own["update"], own.to_dicts(), strict=True)
    ]


def _update_values(update: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what the learner measured, its further metrics beside; None before training."""
    if update is None:
        return None
    return {name: update[name] for name in MEASURED} | {"further": json.loads(update["metrics"] or "{}")}


TOKEN_COLOURS = ("advantage", "logprob", "component")
"""By what tokens are coloured."""
MOST_TOKENS = 2000
"""Tokens that are drawn at once; of a sample that has more, the first. The page of its trace has all."""
LEAST_LOGPROB = -4.0
"""What is as improbable as this, or more, has the faintest colour: exp(-4) is 2 in 100."""
COMPONENTS = {"rl_weights": "rl", "ce_weights": "ce", "ref_kl_weights": "ref_kl"}


def row_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return a row. Raises NotThere where the step has no batch or the batch no such row."""
    run, step, number = asked.path["run"], asked.required_number("step"), asked.required_number("row")
    of = packed_step(library, run, step)
    rows = batch.rows(library, of)
    own = rows.filter(pl.col("row") == number)
    if own.is_empty():
        why = (
            "its rows were dropped for their age"
            if has_lost_rows(library, [of.batches], "batches")
            else f"no row {number}"
        )
        raise NotThere(f"the batch of step {step} of run {run!r} has {len(rows)} rows, numbered from 0; {why}")
    whole, inside = overview(library, of), row_samples(library, of, number)
    said = packed_traces(library, of)
    said = said.filter(pl.col("trace_id").is_in(inside["trace_id"].to_list()))
    values = {
        "run": run,
        "step": step,
        "read": read_rollouts(library, run, sorted_rows(said, asked), asked),
        "row": drawn_rows(library, of, own)[0] | {name: own[name][0] for name in DENOMINATORS},
        "samples": [each | {"address": trace_of(of.run, each)} for each in inside.to_dicts()],
        "colour": asked.one_of("colour", TOKEN_COLOURS, "component" if whole["largest"] is None else "advantage"),
        "colours": TOKEN_COLOURS,
        **{name: whole[name] for name in ("state", "policy", "key", "capacity", "largest", "rewards", "environments")},
        "retired": whole["retired"],
        "drawn": _shown_samples(library, of, number, asked, whole["largest"]),
        "command": f"stagecoach lineage {run}:{step}:{number}",
        **neighbours(rows["row"].to_list(), number),
    }
    way = (*crumbs(run, step), Crumb("batch", addresses.batch(run, step)))
    return Page("row.html", f"Row {number}", values, way, may_change(library, of))


def _shown_samples(
    library: StoreReader, of: PackedStep, number: int, asked: PageRequest, largest: float | None
) -> dict[str, Any]:
    """Return the tokens of the samples from `first` on, as many samples as MOST_TOKENS hold."""
    samples = row_samples(library, of, number)
    if samples.is_empty():
        return {"first": 0, "last": None, "before": None, "after": None, "samples": []}
    first = asked.number("first", 0)
    if first >= len(samples):
        raise BadQuestion(f"first={first}: the row has the samples 0 to {len(samples) - 1}")
    lengths = samples["num_tokens"].to_list()
    shown = _fitting(lengths[first:])
    chosen = samples.slice(first, shown)
    tokens = batch.tokens(library, of, number)
    pieces = []
    for place in chosen["place"]:
        own = tokens.filter(pl.col("place") == place)
        drawn = _tokens(library, of, own.head(MOST_TOKENS), largest)
        pieces.append({"place": place, "tokens": drawn, "left_out": len(own) - len(drawn)})
    return {
        "first": first,
        "last": first + shown - 1,
        # Counted backwards from here, so that each part is as full as it can be in this direction too.
        "before": max(first - _fitting(lengths[:first][::-1]), 0) if first else None,
        "after": first + shown if first + shown < len(samples) else None,
        "samples": pieces,
    }


def _fitting(lengths: list[int]) -> int:
    """Return how many of the samples, in order, have at most MOST_TOKENS together; at least the first."""
    return max(1, sum(total <= MOST_TOKENS for total in accumulate(lengths)))


def _tokens(library: StoreReader, of: PackedStep, tokens: pl.DataFrame, largest: float | None) -> list[dict[str, Any]]:
    """Return the tokens of one sample with their texts and the steps of colour of each."""
    token_texts = texts(library, of.run, tokens["token_id"].to_list())
    return [_token(row, text, largest) for row, text in zip(tokens.drop("place").to_dicts(), token_texts, strict=True)]


def _token(row: dict[str, Any], text: tuple[str, bool], largest: float | None) -> dict[str, Any]:
    components = [name for column, name in COMPONENTS.items() if row[column]]
    # Zero where it was not sampled; of a token that counts in rl, which was sampled, that it was certain.
    sampled = row["logprob"] != 0 or row["rl_weights"] != 0
    return {
        **row,
        "advantage": row["advantage"] if row["rl_weights"] else None,
        "logprob": row["logprob"] if sampled else None,
        "text": text[0],
        "special": text[1],
        "levels": {
            "adv": diverging(row["advantage"] if row["rl_weights"] else None, largest),
            "lp": sequential(row["logprob"], LEAST_LOGPROB, 0.0) if sampled else "none",
            "com": components[0] if len(components) == 1 else "several" if components else "none",
        },
    }

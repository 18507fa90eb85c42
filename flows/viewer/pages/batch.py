"""The packed batch of a step, and one of its rows.

A batch is rows as bars of their samples, what the updates measured and what decided about it; a row its samples, what
each weighs, and its tokens as the learner was given them.
"""

import json
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.compare import MEASURES
from flows.queries.reader import read_rollouts, reply_heads, sorted_rows
from flows.queries.request import NotThere, PageRequest
from flows.queries.rollouts import traces_of
from flows.queries.row_lineage import policy_names, policy_version
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows, has_lost_rows
from flows.reporting.svg import diverging, sequential
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.pages.step import neighbours

Row = dict[str, Any]
COLOURS = ("advantage", "reward", "sample", "environment")
"""By what samples are coloured."""
MOST_ROWS, MOST_SAMPLES = 100, 2000
"""What a page shows at most; of samples about so many, and a row at least."""
MEASURED = (*MEASURES, "mismatch_kl_max")
DENOMINATORS = {"rl_tokens": "RL tokens", "ce_tokens": "CE tokens", "ref_kl_tokens": "Ref-KL tokens"}
"""Tokens of an update that each component weighs, and is divided by; with their titles."""


def batch_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the batch of a step. Raises NotThere where it has none."""
    packed = _Batch(reader, request)
    rows, overview = packed.rows, packed.overview()
    size = rows_per_page(rows)
    page = request.number("page", 0, most=max(len(rows) - 1, 0) // size)
    values = {
        **overview,
        "run": packed.run,
        "step": packed.step,
        "read": packed.read(request),
        "colour": request.one_of("colour", COLOURS, "sample" if overview["largest"] is None else "advantage"),
        "colours": COLOURS,
        "updates": packed.updates(),
        "rows": packed.drawn_rows(rows.slice(page * size, size)),
        "denominators": DENOMINATORS,
        "measures": MEASURED,
        "decisions": [{**each, "figures": json.loads(each["figures"])} for each in packed.decisions],
        "first_row": page * size,
        "page_number": page,
        "num_pages": -(-len(rows) // size),
        **neighbours(batch.steps(reader, packed.run), packed.step),
    }
    return Page("batch.html", "Batch", values, packed.crumbs, packed.may_change)


def rows_per_page(rows: pl.DataFrame) -> int:
    """Return how many rows of a batch a page shows: fewer where each holds many samples, as each is a link."""
    samples = int(rows["num_samples"].sum())
    return max(1, min(MOST_ROWS, MOST_SAMPLES * len(rows) // max(samples, 1)))


def trace_of(run: str, sample: Row) -> str | None:
    """Return the address of the trace that a sample is of, at its branch; None where the trace is not there."""
    branch = str(sample["branch"]) if sample["branch"] else ""
    trace_id, key = sample["trace_id"], sample["key"] or ""
    return addresses.trace(run, trace_id, key, branch=branch) if trace_id else None


class _Batch:
    """The batch that an address names, with the frames that both pages read."""

    def __init__(self, reader: StoreReader, request: PageRequest) -> None:
        self.reader, self.run, self.step = reader, request.path["run"], request.required_number("step")
        self.of = batch.packed_step(reader, self.run, self.step)
        self.rows, self.samples = batch.rows(reader, self.of), batch.samples(reader, self.of)
        self.decisions = batch.decisions(reader, self.of)
        self.environments = sorted(self.samples["environment"].drop_nulls().unique().to_list())
        self.may_change = self.of.updates is None and any_going(reader, self.run)
        self.crumbs = (
            (self.run, addresses.run(self.run)),
            (f"step {self.step}", addresses.step(self.run, self.step)),
        )

    def overview(self) -> Row:
        """Return the summary of the batch as a whole."""
        of, samples = self.of, self.samples
        largest: Any = samples["advantage"].abs().max()  # None where no sample has an advantage
        return {
            "state": self._state(),
            "policy": self._policy(),
            "key": of.batches.key,
            "retired": expired_rows(self.reader, (of.batches, *of.samples, *of.traces, of.updates)),
            "computed_by": of.batches.computed_by,
            "capacity": of.capacity,
            "num_rows": len(self.rows),
            "num_padding": int((self.rows["num_samples"] == 0).sum()),
            "num_samples": len(samples),
            "num_traces": samples["trace_id"].n_unique(),
            "num_tokens": int(self.rows["num_tokens"].sum()),
            "fill": self.rows["fill"].mean(),
            "environments": self.environments,
            "largest": None if largest is None else float(largest),
            "rewards": [samples["reward"].min(), samples["reward"].max()],
        }

    def _state(self) -> str:
        if self.of.updates:
            return "trained" if self.of.updates.finished else "being trained"
        return "refused" if self.decisions and not self.decisions[-1]["approved"] else "packed, not trained"

    def _policy(self) -> Row | None:
        """Return which policy training made of which; None before training."""
        updates = self.of.updates
        if updates is None:
            return None
        version, before = policy_version(updates), self.reader.graph.works.get(updates.inputs.get("policy", ""))
        names = policy_names(before) if before else []
        # A policy has a name in every run that shares it; that of this run says most.
        names.sort(key=lambda name: name.rpartition(":")[0] != self.run)
        made = {"made": f"{self.run}:{version}", "version": version, "key": updates.key}
        return made | {"from": next(iter(names), None)}

    def read(self, request: PageRequest, traces: pl.Series | None = None) -> Row:
        """Return what the rollouts of the batch said, or those of some traces."""
        ids, key = self.samples["trace_id"] if traces is None else traces, self.of.batches.key
        lineages = [each for each in self.reader.history(self.run).lineages if each.batches and each.batches.key == key]
        frame = traces_of(self.reader, self.run, lineages).filter(pl.col("trace_id").is_in(ids.unique().implode()))
        return read_rollouts(self.reader, self.run, sorted_rows(frame, request), request)

    def drawn_rows(self, rows: pl.DataFrame) -> list[Row]:
        """Return rows with their samples, ready to be drawn."""
        # The samples of the shown rows alone: a batch may hold a hundred thousand.
        shown = self.samples.filter(pl.col("row").is_in(rows["row"].to_list()))
        heads = reply_heads(self.reader, shown.drop_nulls("key"))
        number = {name: place for place, name in enumerate(self.environments)}
        by_row: dict[int, list[Row]] = {}
        for sample in shown.to_dicts():
            more = {"of_environment": number.get(sample["environment"]), "address": trace_of(self.run, sample)}
            by_row.setdefault(sample["row"], []).append({**sample, **more, "said": heads.get(sample["trace_id"])})
        plain = rows.drop("sample_ids", "cu_seqlens", *DENOMINATORS).to_dicts()
        return [{**row, "samples": by_row.get(row["row"], [])} for row in plain]

    def updates(self) -> list[Row]:
        """Return the updates with their denominators, counts of their rows, and what was measured."""
        measured = {
            row["update"]: {name: row[name] for name in MEASURED} | {"further": json.loads(row["metrics"] or "{}")}
            for row in batch.updates(self.reader, self.of).to_dicts()
        }
        counts = self.rows.group_by("update", maintain_order=True).agg(
            pl.col(*DENOMINATORS).first(),
            num_rows=pl.len().cast(pl.Int64),
            num_ranks=pl.col("rank").n_unique().cast(pl.Int64),
            num_tokens=pl.col("num_tokens").sum(),
        )
        return [
            {"number": row["update"], **row, "measured": measured.get(row.pop("update"))} for row in counts.to_dicts()
        ]


TOKEN_COLOURS = ("advantage", "logprob", "component")
"""By what tokens are coloured."""
MOST_TOKENS = 2000
"""Tokens that are drawn at once, of whole samples; of a longer one the first. The page of its trace has all."""
LEAST_LOGPROB = -4.0
"""What is as improbable as this, or more, has the faintest colour: exp(-4) is 2 in 100."""
COMPONENTS = {"rl_weights": "rl", "ce_weights": "ce", "ref_kl_weights": "ref_kl"}


def row_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return a row. Raises NotThere where the step has no batch or the batch no such row."""
    packed, number = _Batch(reader, request), request.required_number("row")
    run, step, rows = packed.run, packed.step, packed.rows
    own = rows.filter(row=number)
    if own.is_empty():
        gone = has_lost_rows(reader, [packed.of.batches], "batches")
        why = "its rows were dropped for their age" if gone else f"no row {number}"
        raise NotThere(f"the batch of step {step} of run {run!r} has {len(rows)} rows, numbered from 0; {why}")
    overview, samples = packed.overview(), batch.row_samples(reader, packed.of, number)
    of_batch = ("state", "policy", "key", "capacity", "largest", "rewards", "environments", "retired")
    values = {
        **{name: overview[name] for name in of_batch},
        "run": run,
        "step": step,
        "read": packed.read(request, samples["trace_id"]),
        "row": packed.drawn_rows(own)[0] | {name: own[name][0] for name in DENOMINATORS},
        "samples": [sample | {"address": trace_of(run, sample)} for sample in samples.to_dicts()],
        "colour": request.one_of("colour", TOKEN_COLOURS, "component" if overview["largest"] is None else "advantage"),
        "colours": TOKEN_COLOURS,
        "drawn": _drawn_samples(packed, number, samples, request, overview["largest"]),
        "command": f"stagecoach lineage {run}:{step}:{number}",
        **neighbours(rows["row"].to_list(), number),
    }
    crumbs = (*packed.crumbs, ("batch", addresses.batch(run, step)))
    return Page("row.html", f"Row {number}", values, crumbs, packed.may_change)


def _drawn_samples(
    packed: _Batch, number: int, samples: pl.DataFrame, request: PageRequest, largest: float | None
) -> Row:
    """Return the tokens of the samples from `first` on, as many as have MOST_TOKENS together; of one at least."""
    places, lengths = samples["place"].to_list(), samples["num_tokens"].to_list()
    first = request.number("first", 0, most=max(len(places) - 1, 0))
    end = first + _num_drawn(lengths[first:])
    tokens, drawn = batch.tokens(packed.reader, packed.of, number), []
    for place in places[first:end]:
        rows = tokens.filter(place=place).drop("place")
        shown = rows.head(MOST_TOKENS)
        texts = batch.texts(packed.reader, packed.run, shown["token_id"].to_list())
        marked = [_token(row, text, largest) for row, text in zip(shown.to_dicts(), texts, strict=True)]
        drawn.append({"place": place, "tokens": marked, "left_out": len(rows) - len(shown)})
    return {
        "first": first,
        "last": first + len(drawn) - 1 if drawn else None,
        "before": first - _num_drawn(reversed(lengths[:first])) if first else None,
        "after": end if end < len(places) else None,
        "samples": drawn,
    }


def _num_drawn(lengths: Iterable[int]) -> int:
    return max(1, sum(total <= MOST_TOKENS for total in accumulate(lengths)))


def _token(row: Row, text: tuple[str, bool], largest: float | None) -> Row:
    components = [name for column, name in COMPONENTS.items() if row[column]]
    # Zero where it was not sampled; of a token that counts in rl, which was sampled, that it was certain.
    sampled = row["logprob"] != 0 or row["rl_weights"] != 0
    advantage = row["advantage"] if row["rl_weights"] else None
    return {
        **row,
        "advantage": advantage,
        "logprob": row["logprob"] if sampled else None,
        "text": text[0],
        "special": text[1],
        "levels": {
            "adv": diverging(advantage, largest),
            "lp": sequential(row["logprob"], LEAST_LOGPROB, 0.0) if sampled else "none",
            "com": components[0] if len(components) == 1 else "several" if components else "none",
        },
    }

"""batch_page: the packed batch of a step.

Its rows as bars of their samples, measurements of the updates, the decision about it, and the samples of one row.
"""

import json
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.compare import MEASURES
from flows.queries.request import NotThere, PageRequest
from flows.queries.row_lineage import policy_name, policy_version
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows, has_lost_rows
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.pages.step import neighbours

Row = dict[str, Any]
COLOURS = ("advantage", "reward", "sample")
"""By what samples are coloured."""
MOST_ROWS, MOST_SAMPLES = 100, 2000
"""What a page shows at most; of samples about so many, and a row at least."""
MEASURED = (*MEASURES, "mismatch_kl_max")
DENOMINATORS = {"rl_tokens": "RL tokens", "ce_tokens": "CE tokens", "ref_kl_tokens": "Ref-KL tokens"}
"""Tokens of an update that each component weighs, and is divided by; with their titles."""


def batch_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the batch of a step; `row` adds the samples of a row. Raises NotThere where there is none."""
    packed = _Batch(reader, request)
    of, rows, samples = packed.of, packed.rows, packed.samples
    size = rows_per_page(rows)
    page = request.number("page", 0, most=max(len(rows) - 1, 0) // size)
    largest: Any = samples["advantage"].abs().max()  # None where no sample has an advantage
    values = {
        **{"run": packed.run, "step": packed.step, "state": packed.state(), "policy": packed.policy()},
        **{"key": of.batches.key, "computed_by": of.batches.computed_by, "capacity": of.capacity},
        "retired": expired_rows(reader, (of.batches, *of.samples, *of.traces, of.updates)),
        "largest": None if largest is None else float(largest),
        "rewards": [samples["reward"].min(), samples["reward"].max()],
        "colour": request.one_of("colour", COLOURS, "sample" if largest is None else "advantage"),
        "colours": COLOURS,
        "num_rows": len(rows),
        "num_padding": int((rows["num_samples"] == 0).sum()),
        "num_samples": len(samples),
        "num_traces": samples["trace_id"].n_unique(),
        "num_tokens": int(rows["num_tokens"].sum()),
        "fill": rows["fill"].mean(),
        "updates": packed.updates(),
        "row": packed.row(request.number("row", 0)) if request.text("row") else None,
        "rows": packed.drawn_rows(rows.slice(page * size, size)),
        "denominators": DENOMINATORS,
        "measures": MEASURED,
        "decisions": [{**each, "figures": json.loads(each["figures"])} for each in packed.decisions],
        "first_row": page * size,
        "page_number": page,
        "num_pages": -(-len(rows) // size),
        **neighbours(batch.steps(reader, packed.run), packed.step),
    }
    crumbs = ((packed.run, addresses.run(packed.run)), (f"step {packed.step}", addresses.step(packed.run, packed.step)))
    return Page("batch.html", "Batch", values, crumbs, of.updates is None and any_going(reader, packed.run))


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
    """The batch that an address names, with its frames."""

    def __init__(self, reader: StoreReader, request: PageRequest) -> None:
        self.reader, self.run, self.step = reader, request.path["run"], request.required_number("step")
        self.of = batch.packed_step(reader, self.run, self.step)
        self.rows, self.samples = batch.rows(reader, self.of), batch.samples(reader, self.of)
        self.decisions = batch.decisions(reader, self.of)

    def state(self) -> str:
        """Return how far training on it is."""
        if self.of.updates:
            return "trained" if self.of.updates.finished else "being trained"
        return "refused" if self.decisions and not self.decisions[-1]["approved"] else "packed, not trained"

    def policy(self) -> Row | None:
        """Return which policy training made of which; None before training."""
        updates = self.of.updates
        if updates is None:
            return None
        before = policy_name(self.reader.graph, updates.inputs.get("policy", ""), self.run)
        return {"made": f"{self.run}:{policy_version(updates)}", "from": before}

    def row(self, number: int) -> Row:
        """Return the samples of a row, each with the sums of its weights. Raises NotThere without such a row."""
        if number not in self.rows["row"]:
            gone = has_lost_rows(self.reader, [self.of.batches], "batches")
            why = "its rows were dropped for their age" if gone else f"no row {number}"
            batch_of = f"the batch of step {self.step} of run {self.run!r}"
            raise NotThere(f"{batch_of} has {len(self.rows)} rows, numbered from 0; {why}")
        samples = batch.row_samples(self.reader, self.of, number).to_dicts()
        return {"row": number, "samples": [{**each, "address": trace_of(self.run, each)} for each in samples]}

    def drawn_rows(self, rows: pl.DataFrame) -> list[Row]:
        """Return rows with their samples, ready to be drawn."""
        # The samples of the shown rows alone: a batch may hold a hundred thousand.
        by_row: dict[int, list[Row]] = {}
        for sample in self.samples.filter(pl.col("row").is_in(rows["row"].to_list())).to_dicts():
            by_row.setdefault(sample["row"], []).append({**sample, "address": trace_of(self.run, sample)})
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
        return [{**row, "measured": measured.get(row["update"])} for row in counts.to_dicts()]

"""Metrics: what a step came to in numbers, one row for each, written once for all that show or export them.

Reads traces and, as far as the step came, assignments, messages, token_policies, intakes, stale_groups, intake_loads,
engine_metrics, judgements, verdicts, samples, batches, decisions, updates, token_statistics and token_masks; writes
metrics.

Only what the tables say is here, the measured seconds of rollouts and of optimizer steps among it. How long
stages took is of one attempt at them and stands in the ledger: `timing/stage/...`, `tokens/stage/...` and
`tokens_per_second/...` are taken from there wherever metrics are shown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import METRICS, SAMPLES, TOKEN_MASKS, VERDICTS
from tasks.arrays.columns import texts
from tasks.arrays.group_parts import group_parts
from tasks.metrics.accounting import COLUMNS as OF_ACCOUNTS
from tasks.metrics.accounting import account_metrics, group_metrics
from tasks.metrics.engines import engine_metrics
from tasks.metrics.figures import BATCH_COLUMNS, TRACE_COLUMNS, Values, batch_figures
from tasks.metrics.judges import judge_metrics
from tasks.metrics.rollouts import COLUMNS as OF_ROLLOUTS
from tasks.metrics.rollouts import RETOKENISED_COLUMNS, retokenised_turns, rollout_metrics
from tasks.metrics.stream import stream_metrics
from tasks.metrics.tokens import token_metrics
from tasks.metrics.updates import update_metrics
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Stage, Tables
from tasks.runtime.stored_rows import StoredRows

HELD_COLUMNS = {
    "traces": list(dict.fromkeys((*OF_ROLLOUTS, *OF_ACCOUNTS, *TRACE_COLUMNS))),
    "samples": [name for name in SAMPLES.arrow.names if name not in SAMPLES.aligned],
    "batches": BATCH_COLUMNS,
}
"""What is held of tables that are read in parts: columns of one small value for each row, and of ids."""


LARGE = ("messages", "samples", "batches", "token_statistics")
"""Optional tables that are read in parts."""


@dataclass(frozen=True)
class MetricsInputs:
    """The tables of a step, as far as it came."""

    tables: Tables
    """Small tables, and `HELD_COLUMNS` of those that are read in parts."""
    large: Mapping[str, StoredRows]
    """Those of `LARGE`."""
    num_batches: int
    """Number of the step's assignments."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        large = {name: rows for name in LARGE if (rows := attempt.optional_rows(name))}
        tables = {"traces": attempt.rows("traces").table(HELD_COLUMNS["traces"])}
        for name in STAGE.optional:
            if name in large and name in HELD_COLUMNS:
                tables[name] = large[name].table(HELD_COLUMNS[name])
            elif name not in LARGE and (table := attempt.optional_table(name)) is not None:
                tables[name] = table
        return cls(tables, large, attempt.parameters)


def metrics(inputs: MetricsInputs, config: View) -> Tables:
    """Return one row for each metric of a step.

    What a step did not measure has no row. Values that are not finite stay as they are. Raises AccountBreach where a
    packed step does not account for every rollout.
    """
    tables, traces = inputs.tables, inputs.tables["traces"]
    verdicts = tables.get("verdicts", VERDICTS.arrow.empty_table())
    filters = config.filter_names if verdicts.num_rows else ()
    found = rollout_metrics(
        traces, verdicts, filters, _count_retokenised(traces, inputs.large), tables.get("token_policies")
    )
    found |= _token_metrics(tables, inputs.large)
    for unscoped in _step_metrics(inputs, config):
        found |= {("", name): value for name, value in unscoped.items()}
    return {"metrics": metrics_table(found)}


def metrics_table(values: Values) -> pa.Table:
    """Return metrics as rows, by scope and name."""
    rows = [(*name, values[name]) for name in sorted(values)]
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, METRICS.arrow, strict=True)],
        schema=METRICS.arrow,
    )


def _step_metrics(inputs: MetricsInputs, config: View) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of a step as a whole."""
    tables = inputs.tables
    yield account_metrics(tables)
    yield stream_metrics(tables)
    if config.wanted_groups and {"assignments", "samples"} <= tables.keys():
        yield group_metrics(config.wanted_groups, inputs.num_batches, tables["assignments"], inputs.large["samples"])
    if "engine_metrics" in tables:
        yield engine_metrics(tables["engine_metrics"])
    if "judgements" in tables:
        yield judge_metrics(tables["judgements"].to_pylist())
    if "updates" in tables:
        yield update_metrics(tables["updates"].to_pylist())
    figures = batch_figures(tables, config.packing.tokens_per_row)  # those that a gate is asked about
    yield {f"batch/{name}": float(value) for name, value in figures.items() if value is not None}


def _count_retokenised(traces: pa.Table, large: Mapping[str, StoredRows]) -> dict[str, int] | None:
    """Return how many replies were tokenised again, by trace; None where the messages are not there.

    A trace of one branch has none: messages are looked at only where there is another one.
    """
    if "messages" not in large:
        return None
    found: dict[str, int] = {}
    parts = group_parts(traces, large["messages"], columns=RETOKENISED_COLUMNS) if _has_branches(traces) else ()
    for own, messages in parts:
        found |= retokenised_turns(messages) if _has_branches(own) else {}
    return found


def _has_branches(traces: pa.Table) -> bool:
    return (pc.max(traces["num_branches"]).as_py() or 0) > 1


def _token_metrics(tables: Tables, large: Mapping[str, StoredRows]) -> Values:
    """Return the metrics of tokens; none of a step without statistics.

    Masks are not known where some tokens were masked and nobody kept which.
    """
    if "token_statistics" not in large or not all(
        name in tables and tables[name].num_rows for name in ("batches", "samples", "updates")
    ):
        return {}
    masks = tables.get("token_masks")
    if masks is None and not any(tables["updates"]["masked_fraction"].to_pylist()):
        masks = TOKEN_MASKS.arrow.empty_table()
    traces, samples = tables["traces"], tables["samples"]
    environments = dict(zip(texts(traces["trace_id"]), texts(traces["environment"]), strict=True))
    pairs = zip(texts(samples["sample_id"]), texts(samples["trace_id"]), strict=True)
    of_samples = {sample: environments[trace] for sample, trace in pairs}
    return token_metrics(large["batches"], large["token_statistics"], masks, of_samples)


STAGE = Stage(
    name="metrics",
    version=3,
    reads=("traces",),
    writes=("metrics",),
    optional=(
        *("assignments", "messages", "token_policies", "intakes", "stale_groups", "intake_loads", "engine_metrics"),
        *("judgements", "verdicts", "samples", "batches", "decisions", "updates", "token_statistics", "token_masks"),
    ),
    sections=("filter_names", "wanted_groups", "packing"),
    read_inputs=MetricsInputs.read,
    function=metrics,
)
task = as_task(STAGE)

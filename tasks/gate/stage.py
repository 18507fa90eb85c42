"""The gate: whether a step's batch goes on to training, by a rule or by a person; the decision is a row.

Reads traces, messages, verdicts, samples, batches, and metrics of steps before; writes decisions. A rule is a condition
in SQL over the figures of a batch, such as `trainable_ratio > 0.1 and reward_mean is not null`. One that comes out as
null does not hold: what is not known lets nothing through.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.errors import ConfigError
from configs.run import View
from storage.schemas.stage_tables import DECISIONS
from tasks.arrays.columns import rows_with
from tasks.metrics.figures import (
    ALL,
    FIGURE_COLUMNS,
    MEANINGS,
    SCORE_MEANINGS,
    Figures,
    Values,
    batch_figures,
    full_name,
    in_words,
    metric_values,
    score_figures,
)
from tasks.metrics.warnings import DISAGREE, REWARD_PART, RULES, held_rules
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import Answer, Approve, Question, Shown, require
from tasks.runtime.stage import Attempt, Stage, Tables
from tasks.runtime.stored_rows import StoredRows, rows_of

if TYPE_CHECKING:
    import duckdb  # a tenth of a second to import, for runs that have a rule

SEALED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,
    "temp_directory": "",
    "lock_configuration": True,
    "threads": 1,
}
"""A rule sees the figures and nothing else: no files, those of the working directory's `.tmp` included, no network."""
SCORE = re.compile(r"\b(score_mean|score_trend)\s*\[\s*'([^']+)'\s*\]")
"""What a rule names of a score."""
MEAN = re.compile("rewards/(.+)/mean")
COUNTS = tuple(name for name in MEANINGS if name.startswith("num_"))
_READ = (*(rule.name for rule in RULES if not rule.figure.startswith("figures/")), REWARD_PART, DISAGREE)
WARNINGS = tuple(f"warning_{rule}" for rule in _READ)
"""Figures of a rule on warnings: 1 where one holds at the batch or the step before, else 0. Recorded metrics have no
figures of replies."""
ALONE = (*MEANINGS, "warnings", *WARNINGS)
"""All figures that are numbers."""
OF_BATCH = {
    "num_output_tokens/all": "output_tokens_mean",
    "is_truncated/all": "truncated_ratio",
    "errored_rollout/all": "errored_ratio",
    "reward/all/mean": "reward_mean",
}
"""The figures of a batch that warnings look at, by their names in the metrics of a step."""


@dataclass(frozen=True)
class GateInputs:
    """The figures of a batch, its rollouts, and who approves it."""

    tables: Tables
    """Columns of the tables from which the figures are made: `FIGURE_COLUMNS`."""
    messages: StoredRows
    before: Sequence[Values]
    """Metrics of the steps before."""
    step: int
    key: str
    approve: Approve

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        columns = FIGURE_COLUMNS | {"traces": [*FIGURE_COLUMNS["traces"], "rewards"]}
        tables = {name: attempt.rows(name).table(names) for name, names in columns.items()}
        steps = [ref for ref in attempt.refs if ref.stage == "metrics"]
        before = [metric_values(attempt.context.table("metrics", [ref])) for ref in steps]
        approve = require(attempt.services.approve)
        return cls(tables, attempt.rows("messages"), before, attempt.step, attempt.key, approve)


def gate(inputs: GateInputs, config: View) -> Tables:
    """Return the one row that says whether the batch goes on. Raises what `approve` raises, and RuleFailed."""
    asked_at = datetime.now(UTC)
    figures = batch_figures(inputs.tables, config.packing.tokens_per_row)
    rule, window = (config.gate.rule, config.gate.window) if config.gate.type == "rule" else (None, 0)
    means = [_recorded_means(values) for values in inputs.before]
    figures = {**figures, **score_figures(inputs.tables["traces"], means, window)}
    if rule is not None:
        figures |= warning_figures(inputs.before, figures) if "warning" in rule.lower() else {}
        answer = by_rule(rule, figures)
    else:
        shown = shown_rollouts(inputs.tables["traces"], inputs.messages)
        answer = inputs.approve(Question(inputs.step, inputs.key, figures, shown, config.gate.timeout_seconds))
    row = {
        "gate": config.gate.type,
        "approved": answer.approved,
        "rule": rule,
        "decided_by": answer.by,
        "reason": answer.reason,
        "figures": json.dumps(figures),
        "asked_at": asked_at,
        "decided_at": datetime.now(UTC),
    }
    return {"decisions": pa.Table.from_pylist([row], schema=DECISIONS.arrow)}


def _recorded_means(metrics: Values) -> dict[str, float]:
    """Return the means of named rewards over all environments, by name, of the metrics of a step."""
    named = ((MEAN.fullmatch(name), value) for (scope, name), value in metrics.items() if scope == ALL)
    return {match[1]: value for match, value in named if match}


def warning_figures(before: Sequence[Values], figures: Figures) -> dict[str, float]:
    """Return how many `warnings` hold, and which, at a batch or at the last of the steps before it."""
    named = [{full_name(*name): value for name, value in values.items()} for values in before]
    named.append({name: value for name, figure in OF_BATCH.items() if (value := figures[figure]) is not None})
    steps = [{"step": number, "metrics": metrics} for number, metrics in enumerate(named)]
    held = {hit.rule for hit in (*held_rules(steps[:-1]), *held_rules(steps))}
    return {"warnings": float(len(held)), **{name: float(name[8:] in held) for name in WARNINGS}}


def by_rule(rule: str, figures: Figures) -> Answer:
    """Return what a rule says of a batch, with the figures that it names. Raises RuleFailed for an unknown score."""
    if unknown := {f"{name}/{score}" for name, score in SCORE.findall(rule)} - figures.keys():
        scores = [name.removeprefix("score_mean/") for name in figures if name.startswith("score_mean/")]
        raise RuleFailed(
            f"gate.rule: no rollout of this batch has {min(unknown)}; the named rewards are "
            f"{', '.join(scores) or 'none'}. Nothing was trained on this batch. Correct the rule and resume "
            "(gate.rule=...)."
        )
    approved = holds(rule, figures)
    return Answer(
        approved, "rule", f"{rule} {'holds' if approved else 'does not hold'}: {describe_figures(rule, figures)}"
    )


def shown_rollouts(traces: pa.Table, messages: pa.Table | StoredRows) -> tuple[Shown, ...]:
    """Return the best, the median and the worst rollout by reward with their texts; fewer where fewer were scored.

    Those of seats that are not the policy's are not asked about.
    """
    chosen_from = pc.and_(pc.is_valid(traces["reward"]), traces["trainable"])
    # Ties are broken by id, so that the same batch shows the same rollouts.
    scored = traces.select(["trace_id", "reward"]).filter(chosen_from).to_pylist()
    ranked = sorted(scored, key=lambda row: (row["reward"], row["trace_id"]))
    if not ranked:
        return ()
    places = {0: "worst", len(ranked) // 2: "median", len(ranked) - 1: "best"}  # of one rollout, the last of these
    chosen = [(label, ranked[place]) for place, label in sorted(places.items(), reverse=True)]
    names = [row["trace_id"] for _, row in chosen]
    parts = rows_of(messages).parts(["trace_id", "message", "role", "content"])
    own = pa.concat_tables([rows_with(part, "trace_id", names) for part in parts])
    return tuple(Shown(label, row["trace_id"], row["reward"], _texts(own, row["trace_id"])) for label, row in chosen)


def _texts(messages: pa.Table, trace_id: str) -> tuple[tuple[str, str], ...]:
    rows = messages.filter(pc.equal(messages["trace_id"], pa.scalar(trace_id))).sort_by("message").to_pylist()
    return tuple((row["role"], row["content"] or "") for row in rows)


class RuleFailed(ValueError):
    """A rule that was fine by itself could not be worked out over the figures of a batch."""


def require_rule(rule: str) -> None:
    """Raise ConfigError unless `rule` is one condition in SQL over the figures."""
    import duckdb

    try:
        with duckdb.connect(":memory:", config=SEALED) as connection:
            problem = _problem(connection, rule)
    except duckdb.Error as error:
        problem = _first_line(error)
    if problem:
        names = ", ".join([*ALONE, *(f"{name}['REWARD']" for name in SCORE_MEANINGS)])
        raise ConfigError([f"gate.rule: {rule!r}: {problem}; a rule is a condition in SQL over: {names}"])


def holds(rule: str, figures: Figures) -> bool:
    """Tell whether a rule is true of the figures; false and null are not. Raises RuleFailed where SQL fails on them."""
    import duckdb

    try:
        with duckdb.connect(":memory:", config=SEALED) as connection:
            ((found,),) = _query_rows(connection, rule, figures).fetchall()
    except (duckdb.Error, ValueError) as error:
        raise RuleFailed(
            f"gate.rule: {rule!r} cannot be worked out over {describe_figures(rule, figures)}: {_first_line(error)}. "
            "Nothing was trained on this batch; everything up to it is safe. Correct the rule and resume "
            "(gate.rule=...)."
        ) from error
    return found is True


def describe_figures(rule: str, figures: Figures) -> str:
    """Return the figures that a rule names, for a message; all of them where it names none."""
    words = {*re.findall(r"\w+", rule.lower()), *map("/".join, SCORE.findall(rule))}
    return in_words({name: value for name, value in figures.items() if name in words} or figures)


def _problem(connection: "duckdb.DuckDBPyConnection", rule: str) -> str:
    """Return what is wrong with a rule; empty where it is one condition. Unknown names raise duckdb.Error."""
    if len(connection.extract_statements(_query(rule))) != 1:
        return "this is more than one statement"
    asked = _query_rows(connection, rule, dict.fromkeys(ALONE))
    (found,) = (str(each) for each in asked.types)
    if found != "BOOLEAN":
        return f"this is a value of type {found}, which is neither true nor false"
    return "" if len(asked.fetchall()) == 1 else "this is more than one value"


def _query_rows(connection: "duckdb.DuckDBPyConnection", rule: str, figures: Figures) -> "duckdb.DuckDBPyRelation":
    fields: list[pa.Field[Any]] = [pa.field(name, pa.int64() if name in COUNTS else pa.float64()) for name in ALONE]
    fields += [pa.field(name, pa.map_(pa.string(), pa.float64())) for name in SCORE_MEANINGS]
    row: dict[str, Any] = dict(figures)
    for figure in SCORE_MEANINGS:
        prefix = f"{figure}/"
        row[figure] = [(name.removeprefix(prefix), row[name]) for name in figures if name.startswith(prefix)]
    connection.register("batch", pa.Table.from_pylist([row], pa.schema(fields)))
    return connection.sql(_query(rule))


def _query(rule: str) -> str:
    return f"SELECT ({rule}\n) FROM batch"  # a rule that ends in a comment must not take the bracket with it


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


STAGE = Stage(
    name="gate",
    version=1,
    reads=("traces", "messages", "verdicts", "samples", "batches"),
    writes=("decisions",),
    sections=("gate", "packing"),
    read_inputs=GateInputs.read,
    function=gate,
    services=("approve",),
    optional=("metrics",),
)
task = as_task(STAGE)

"""The numbers of a run's steps: as they were written, as frames, and as series in groups, with unit and meaning.

Nothing is computed here that a row of table `metrics` could say. Only wall-clock is of the ledger, for it is of one
attempt at some work: `timing/stage/...` in seconds, `tokens/stage/...`, and `tokens_per_second/...` of stages that
handled tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader
from storage.read.frames import Frames
from storage.read.lineage import Work
from storage.refs import Entry
from tasks.metrics.figures import ALL, MEANINGS, Values, full_name


@dataclass(frozen=True)
class Span:
    """What the ledger says of one piece of finished work, or of all of a stage."""

    stage: str
    seconds: float
    tokens: int


def read_metrics(
    frames: Frames, works: Iterable[Work], names: Iterable[str] = (), where: pl.Expr | None = None
) -> dict[str, Values]:
    """Return the metrics that some works have written, by key, in one look at the table; of other works none.

    Only those of some `names`, or that meet a condition: a step has a hundred, and a long run is shown by a few.
    """
    found: dict[str, Values] = {}
    rows = frames.rows(works, "metrics").select("key", "scope", "name", "value")
    if wanted := [*names]:
        rows = rows.filter(pl.col("name").is_in(wanted))
    if where is not None:
        rows = rows.filter(where)
    # A key at a time, and columns as lists: of 300,000 rows one object each would take seconds.
    for (key,), own in rows.collect().partition_by("key", as_dict=True, include_key=False).items():
        found[key] = dict(zip(zip(own["scope"], own["name"], strict=True), own["value"], strict=True))
    return found


def ledger_metrics(spans: Sequence[Span]) -> Values:
    """Return seconds, tokens and tokens a second of the stages of a step."""
    found: Values = {}
    for stage, span in by_stage(spans).items():
        found["", f"timing/stage/{stage}"] = span.seconds
        if span.tokens:
            found["", f"tokens/stage/{stage}"] = float(span.tokens)
        if span.tokens and span.seconds > 0:
            found["", f"tokens_per_second/{stage}"] = span.tokens / span.seconds
    return found


def by_stage(spans: Iterable[Span]) -> dict[str, Span]:
    """Return the sums of each stage, in the order in which the stages come first."""
    found: dict[str, Span] = {}
    for span in spans:
        known = found.get(span.stage, Span(span.stage, 0.0, 0))
        found[span.stage] = Span(span.stage, known.seconds + span.seconds, known.tokens + span.tokens)
    return found


LONG = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean, "scope": pl.String, "name": pl.String}


@dataclass(frozen=True)
class StepNumbers:
    """One step of a run and what was measured."""

    work: RecordedStep
    values: Values
    """By scope (an environment, `all`, or empty) and measure. What was not measured has no entry."""

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.work.step

    def value(self, measure: str, scope: str = "") -> float | None:
        """Return one number; None where it was not measured."""
        return self.values.get((scope, measure))


def numbers(reader: StoreReader, run: str) -> list[StepNumbers]:
    """Return what was measured of every step of a run. Raises NotThere.

    They are those of the table `metrics`, and `ledger_metrics` of the stages that are done beside them: of a step that
    is not finished these alone.
    """
    found = reader.history(run).sampled_steps
    written = written_metrics(reader, found)
    return [
        StepNumbers(each, {**values, **ledger_metrics([_span(work.entry) for work in each.works if work.finished])})
        for each, values in zip(found, written, strict=True)
    ]


def _span(entry: Entry) -> Span:
    return Span(entry.stage, (entry.finished_at - entry.started_at).total_seconds(), entry.tokens)


def written_metrics(reader: StoreReader, steps: Sequence[RecordedStep]) -> list[Values]:
    """Return the metrics of some steps, none of those that are not finished; what was read once is not read again."""
    works = {each.metrics.identity: each.metrics for each in steps if each.metrics is not None}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Values]:
        values = read_metrics(reader.frames(), [works[name] for name in names])
        return {name: values.get(works[name].key, {}) for name in names}

    known = reader.cache.each_once("metrics", list(works), read)
    return [known[each.metrics.identity] if each.metrics is not None else {} for each in steps]


def steps(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each step of a run: run, step, finished, and every number as a column by its full name.

    A column is null where a step did not measure it. Raises NotThere.
    """
    rows = [
        {"run": run, "step": each.step, "finished": each.work.finished}
        | {full_name(*name): value for name, value in sorted(each.values.items())}
        for each in numbers(reader, run)
    ]
    first = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean}
    named = sorted({name for row in rows for name in row} - set(first))
    return pl.DataFrame(rows, schema=first | dict.fromkeys(named, pl.Float64))


def series(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each number of each step: run, step, finished, scope, name, value. Raises NotThere."""
    rows = [
        (run, each.step, each.work.finished, scope, name, value)
        for each in numbers(reader, run)
        for (scope, name), value in sorted(each.values.items())
    ]
    return pl.DataFrame(rows, schema=LONG | {"value": pl.Float64}, orient="row")


class About(NamedTuple):
    """What is said of a number."""

    unit: str
    """`share` is from 0 to 1; empty where it has none: a loss, a reward."""
    description: str


STEPS_OF = {"update": "of the step's last optimizer step", "updates": "over all optimizer steps of the step"}
ABOUT = {
    "reward": About("", "over rollouts that were scored"),
    "reward/std": About("", "standard deviation over rollouts that were scored"),
    "rewards": About("", "mean score of a named reward, without its weight"),
    "metrics": About("", "mean over rollouts, measured by the environment"),
    "rollouts": About("rollouts", "of the step, without those that were stopped"),
    "num_turns": About("turns", "mean of a rollout"),
    "num_input_tokens": About("tokens", "mean of a rollout: what the policy read"),
    "num_output_tokens": About("tokens", "mean of a rollout: what the policy sampled"),
    "longest_output": About("tokens", "most that one rollout sampled"),
    "is_truncated": About("share", "of rollouts that were cut off"),
    "staleness": About("steps", "mean since the policy that sampled, the oldest of a rollout"),
    "token_staleness/mean": About("steps", "mean of sampled tokens since the policy of each"),
    "token_staleness/max": About("steps", "most of a sampled token since its policy"),
    "samples_per_rollout": About("samples", "mean of a rollout, one for each branch"),
    "kept": About("share", "of verdicts that keep"),
    "errored_rollout": About("share", "of rollouts with an error, or one of a class"),
    "stragglers": About("share", "of rollouts that were stopped as enough others had ended"),
    "stale": About("share", "of rollouts of a stream that no step within rollout.max_off_policy_steps took"),
    "filters": About("share", "of rollouts that the filter found, enforced or not"),
    "filters/is_filtered": About("share", "of rollouts that any filter left out"),
    "trainable/count": About("rollouts", "left to train on"),
    "trainable/ratio": About("share", "of rollouts left to train on"),
    "accounting": About("rollouts", "by outcome"),
    "timing": About("s", "mean wall-clock of a rollout"),
    "timing/stage": About("s", "wall-clock of the stage"),
    "tokens": About("tokens", "that the stage handled"),
    "tokens_per_second": About("tokens/s", "of the stage, over its wall-clock"),
    "updates": About("updates", "optimizer steps on the batch"),
    "rollout/input_tokens": About("tokens", "read by all rollouts, those that were stopped too"),
    "rollout/output_tokens": About("tokens", "sampled by all rollouts, those that were stopped too"),
    "rollout/retokenised_turns": About("turns", "that went back to the policy as other tokens than it sampled"),
    "reasons": About("rollouts", "that were left out for that reason"),
    "stream": About("s", "in which the step's groups ended; what follows is of that time"),
    "stream/engine_idle": About("share", "of the time, in which no rollout was under way"),
    "stream/learner_waited": About("share", "of the time, in which the learner waited for rollouts"),
    "stream/cancelled": About("share", "of rollouts that were stopped before their end"),
    "stream/stale": About("share", "of groups that were too old for any step before one took them"),
    "stream/in_flight": About("rollouts", "mean number under way"),
    "stream/fullness": About("share", "of rollout.max_in_flight that was under way"),
    "stream/requests_running": About("requests", "mean number in the engine's batch"),
    "stream/requests_waiting": About("requests", "mean number in the engine's queue"),
    "stream/cache_use": About("share", "of the engine's KV cache in use"),
    "stream/token_age": About("steps", "from the policy that sampled tokens to the one that is trained on them"),
    "stream/tokens_of_age": About("share", "of the tokens that may be trained on, by their age in steps"),
    "groups": About("groups", "of the step, where they are replaced or refused"),
    "groups/batches": About("batches", "that the groups were drawn in"),
    "entropy": About("nats", "mean over rl tokens, over all optimizer steps"),
    "mismatch_kl": About("nats", "over rl tokens of r - 1 - log r, engine against learner"),
    "mismatch_kl_masked": About("nats", "the mismatch of tokens outside the trust region"),
    "mismatch_kl_unmasked": About("nats", "the mismatch of tokens within the trust region"),
    "masked_fraction": About("share", "of rl tokens outside the trust region"),
    "ratio": About("", "quantile of the importance ratio over rl tokens"),
    "rl_tokens": About("tokens", "with that component's weight"),
    "ce_tokens": About("tokens", "with that component's weight"),
    "ref_kl_tokens": About("tokens", "with that component's weight"),
    "ce_nll": About("nats", "negative log-likelihood of ce tokens"),
    "ref_kl": About("nats", "policy against reference, over ref_kl tokens"),
    **{f"batch/{name}": About("", meaning) for name, meaning in MEANINGS.items()},
}
"""By the beginning of a name, the longest that is known."""
OF_UPDATES = {
    "entropy": About("nats", "mean over rl tokens"),
    "mismatch_kl": About("nats", "mean over rl tokens of r - 1 - log r, engine against learner"),
    "mismatch_kl_max": About("nats", "most of an rl token of r - 1 - log r, engine against learner"),
    "mismatch_kl_std": About("nats", "standard deviation over rl tokens of r - 1 - log r, engine against learner"),
    "masked_mismatch_kl": About("nats", "the mismatch of tokens outside the trust region"),
    "unmasked_mismatch_kl": About("nats", "the mismatch of tokens within the trust region"),
    "masked_fraction": About("share", "of rl tokens outside the trust region"),
    "masked_fraction_positive": About("share", "of rl tokens with a positive advantage outside the trust region"),
    "masked_fraction_negative": About("share", "of rl tokens with a negative advantage outside the trust region"),
    "truncated_fraction": About("share", "of rl tokens whose importance weight was cut"),
    "ratio_q": About("", "quantile of the importance ratio over rl tokens"),
    "grad_norm": About("", "norm of the gradient before clipping"),
    "clipped": About("", "1 where the gradient was clipped"),
    "ce_nll": About("nats", "negative log-likelihood of ce tokens"),
    "ref_kl": About("nats", "policy against reference, over ref_kl tokens"),
    "ref_kl_loss": About("", "a component of the loss"),
    "ref_kl_tokens": About("tokens", "with that component's weight"),
    "ref_kl_masked_fraction": About("share", "of ref_kl tokens outside the trust region"),
    "rl_tokens": About("tokens", "with that component's weight"),
    "ce_tokens": About("tokens", "with that component's weight"),
    "rl_loss": About("", "a component of the loss"),
    "ce_loss": About("", "a component of the loss"),
    "loss": About("", "the sum of its components"),
    "learning_rate": About("", "by its schedule"),
    "num_rows": About("rows", "packed rows"),
    "num_tokens": About("tokens", "in packed rows"),
    "weighted_tokens": About("tokens", "that had a weight"),
    "has_optimizer": About("", "1 where the optimizer's state was saved"),
    "version": About("", "the policy that was made"),
    "update": About("", "its number on the batch, from 0"),
    "threads": About("threads", "of each learner process"),
    "processes": About("processes", "of the learner"),
    "seconds_gradients": About("s", "of forward and backward passes"),
    "seconds_optimizer": About("s", "of clipping and the optimizer"),
    "seconds_writing": About("s", "of writing the policy that was made"),
    "tokens_per_second": About("tokens/s", "through both, of all processes"),
    "tflops": About("TFLOP", "that the model needs for the packed segments"),
    "tflops_per_second": About("TFLOP/s", "of each process"),
    "mfu": About("share", "of the device's peak in bfloat16"),
    "peak_allocated_gib": About("GiB", "of the device's memory in tensors"),
    "peak_reserved_gib": About("GiB", "of the device's memory taken"),
}
"""By the beginning of what stands after `update/` and `updates/`."""


def about(measure: str) -> About:
    """Return what a number is by the name of its measure, without its scope; of one that is not known nothing."""
    head, _, rest = measure.partition("/")
    if rest and head in STEPS_OF:
        found = _longest(rest, OF_UPDATES)
        return About(found.unit, ", ".join(filter(None, (found.description, STEPS_OF[head]))))
    return _longest(measure, ABOUT)


def _longest(name: str, known: dict[str, About]) -> About:
    found = [begin for begin in known if name.startswith(begin)]
    return known[max(found, key=len)] if found else About("", "")


ORDER = (
    *("reward", "rewards", "metrics", "update", "updates", "rollouts", "accounting", "filters", "trainable"),
    *("errored_rollout", "stale", "stragglers", "stream", "timing", "tokens", "tokens_per_second"),
)
"""Groups in which most is looked for come first; any others follow."""
LOOSE = "rollouts"
"""The group of measures whose names have one part."""
SHARES = ("errored_rollout", "stale", "stragglers")
"""What has no entry where it is zero, though the rollouts were counted; `accounting` is like it."""
Metric = dict[str, Any]


def metrics(steps: Sequence[StepNumbers]) -> list[Metric]:
    """Return every measure of some steps, by group: `name`, `group`, `unit`, `description` and `series`.

    A series has `scope` (an environment, `all`, or empty), `name` (as W&B has it), and `values` by step,
    None where there is none. With a single environment only the scope `all` is returned: its values are the same.
    """
    columns = _Columns(steps)
    scopes: dict[str, set[str]] = {}
    for scope, measure in columns.values:
        scopes.setdefault(measure, set()).add(scope)
    several = len({scope for own in scopes.values() for scope in own} - {"", ALL}) > 1
    heads = {name.partition("/")[0] for name in scopes if "/" in name}
    groups = {name: head if (head := name.partition("/")[0]) in heads else LOOSE for name in scopes}
    found = [_metric(columns, name, _scopes_to_show(own, several), groups[name]) for name, own in scopes.items()]
    return sorted(found, key=lambda each: (_rank(each["group"]), each["name"]))


def matching(found: Iterable[Metric], text: str) -> list[Metric]:
    """Return the measures in whose names and descriptions all words of a text are."""
    words = text.casefold().split()
    return [each for each in found if all(word in search_text(each) for word in words)]


def search_text(each: Metric) -> str:
    """Return what is searched of a measure."""
    names = (one["name"] for one in each["series"])
    return " ".join((each["name"], each["unit"], each["description"], *names)).casefold()


def ends(values: Sequence[float | None], steps: Sequence[int]) -> dict[str, Any]:
    """Return the first, the last, the least and the most of a series with their steps; None without any value.

    What is not finite is the first or the last, but never the least or the most.
    """
    known = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None]
    # One infinite value would be the most for ever; NaN compares with nothing.
    finite = [pair for pair in known if abs(pair[0]) < float("inf")]
    picked = {
        "first": known[0] if known else None,
        "last": known[-1] if known else None,
        "least": min(finite, key=lambda pair: pair[0], default=None),
        "most": max(finite, key=lambda pair: pair[0], default=None),
    }
    return {name: pair and {"value": pair[0], "step": pair[1]} for name, pair in picked.items()}


class _Columns:
    """The numbers of steps by name instead of by step: gone through once, for there are many of both."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self.values: dict[tuple[str, str], list[float | None]] = {}
        self._accounted = [False] * len(steps)
        for place, each in enumerate(steps):
            for name, value in each.values.items():
                if name not in self.values:
                    self.values[name] = [None] * len(steps)
                self.values[name][place] = value
        for (_, measure), values in self.values.items():
            if measure.startswith("accounting/"):
                self._accounted = [
                    known or value is not None for known, value in zip(self._accounted, values, strict=True)
                ]

    def values_with_zeros(self, scope: str, measure: str) -> list[float | None]:
        """Return a measure by step, with the zeros that have no entry."""
        values = self.values[scope, measure]
        # A step that counted its rollouts and has no entry had none of that kind: zero, and not unknown.
        head = measure.partition("/")[0]
        if head == "accounting":
            return _where(self._accounted, values)
        if head in SHARES and (scope, "rollouts") in self.values:
            return _where([each is not None for each in self.values[scope, "rollouts"]], values)
        return values


def _where(counted: Iterable[bool], values: Iterable[float | None]) -> list[float | None]:
    return [0.0 if value is None and there else value for value, there in zip(values, counted, strict=True)]


def _scopes_to_show(scopes: set[str], several: bool) -> list[str]:
    """Return the scopes that are shown, all rollouts first."""
    # Of one environment alone its numbers are those of all, and a second curve would hide the first.
    alone = not several and ALL in scopes
    return sorted(scopes, key=lambda scope: (scope not in ("", ALL), scope))[: 1 if alone else None]


def _metric(columns: _Columns, name: str, scopes: Sequence[str], group: str) -> Metric:
    series = [
        {"scope": scope, "name": full_name(scope, name), "values": columns.values_with_zeros(scope, name)}
        for scope in scopes
    ]
    return {"name": name, "group": group, **about(name)._asdict(), "series": series}


def _rank(group: str) -> tuple[int, str]:
    return (ORDER.index(group) if group in ORDER else len(ORDER), group)

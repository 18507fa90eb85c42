"""charts: the charts of a run's page, the rows of `flows/reporting/figures.toml` with what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flows.queries.metrics import Columns, StepNumbers
from flows.queries.views import EXPIRED
from flows.reporting.figures import chart_rows
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED
from tasks.metrics.figures import ALL
from tasks.stages import STEP_STAGES

OUTCOMES = {
    **{TRAINED: 2, FILTERED: 4, ERRORED: 6, STOPPED: 7, STALE: 7, NO_WEIGHT: 0},
    **{QUARANTINED: 3, PENDING: 5, REFUSED: 1, EXPIRED: 7},
}
"""The outcomes of rollouts, from the foot of the bars up, each with the number of its colour."""
OF_UPDATES = "mean, lowest and highest of a step's updates"
Values = list[float | None]
Series = dict[str, Any]
Chart = dict[str, Any]


def charts(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sections of charts; a chart without any value is left out. `evaluations` are those of `held_out`."""
    made = _Charts(steps)
    special = {
        "held_out": lambda: _held_out(steps, evaluations),
        "gaps": lambda: _gaps(steps, evaluations),
        "outcomes": made.outcomes,
    }
    sections: dict[str, list[Chart]] = {}
    for row in chart_rows():
        drawn = special[row["special"]]() if "special" in row else made.charts(row)
        enough = (chart for chart in drawn if len(chart["series"]) >= row.get("least", 1))
        sections.setdefault(row["section"], []).extend(enough)
    return [{"title": title, "charts": own} for title, own in sections.items()]


class _Charts:
    """The numbers of a run's steps, and the charts that rows of the file make of them."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self._columns = Columns(steps)
        self._measures = sorted({measure for _, measure in self._columns.values})
        self._scopes = sorted({scope for scope, _ in self._columns.values} - {"", ALL})
        self._several_updates = any((count or 1) > 1 for count in self._columns.series("", "updates"))

    def charts(self, row: Mapping[str, Any]) -> Iterator[Chart]:
        """Yield the charts of a row."""
        if "over" in row:
            yield from self._against_reward(row)
            return
        by_scope = row.get("each") == "environment"
        names = [(scope, scope) for scope in self._scopes] if by_scope else self._matches(row.get("each", ""))
        for name, text in names:
            lines = [
                line
                for one in row["series"]
                for line in self._lines({**one, "measure": one["measure"].replace("{each}", name)}, name * by_scope)
            ]
            if row.get("nonzero"):
                lines = [line for line in lines if any(line["values"])] or lines[:1]
            of_updates = OF_UPDATES if self._several_updates and "low_high" in row["series"][0] else ""
            note = "; ".join(filter(None, (row.get("note"), of_updates)))
            yield _chart(row["title"].format(each=text), lines, row.get("zero", False), row.get("unit", ""), note)

    def _lines(self, one: Mapping[str, Any], scope: str = "") -> list[Series]:
        """Return the lines of a measure, of one scope or of those that the row names."""
        named = one.get("scope", "")
        environments = self._scopes if named in ("environment", "every") and len(self._scopes) > 1 else []
        scopes = [ALL] if named == "every" else [] if named == "environment" else [scope or named]
        lines = []
        for measure, text in self._matches(one["measure"], one.get("without")):
            for place, shown in enumerate((*scopes, *environments), 1 - len(scopes)):
                name = text.replace("_", " ") if one.get("words") else text
                line = {"name": one.get("name") or name or shown, "measure": measure}
                line |= {"values": self._columns.series(shown, measure)} | self._ends(one, shown, measure)
                # An environment has one colour in all charts, the first being that of all rollouts.
                line |= {"place": place} if shown in environments else {}
                lines.append(line | ({"kind": one["kind"]} if "kind" in one else {}))
        return _with_values(lines)

    def _ends(self, one: Mapping[str, Any], scope: str, measure: str) -> dict[str, Values]:
        """Return `low` and `high` of a line that has a band."""
        if "deviation" in one:
            pairs = [*zip(*(self._columns.series(scope, name) for name in (measure, one["deviation"])), strict=True)]
            return {
                end: [None if mean is None or std is None else mean + sign * std for mean, std in pairs]
                for end, sign in (("low", -1.0), ("high", 1.0))
            }
        if "low_high" not in one or not self._several_updates:
            return {}
        begin = measure.removesuffix("mean")
        return {end: self._columns.series(scope, begin + name) for end, name in (("low", "min"), ("high", "max"))}

    def _matches(self, pattern: str, without: str | None = None) -> list[tuple[str, str]]:
        """Return the measures that a pattern is for, stages in their order, each with what its `*` stands for."""
        begin, star, end = pattern.partition("*")
        if not star:
            return [(pattern, "")]
        texts = [
            name[len(begin) : len(name) - len(end)]
            for name in self._measures
            if name.startswith(begin) and name.endswith(end) and len(name) > len(begin) + len(end)
        ]
        texts.sort(key=lambda text: STEP_STAGES.index(text) if text in STEP_STAGES else len(STEP_STAGES))
        return [(begin + text + end, text) for text in texts if text != without]

    def _against_reward(self, row: Mapping[str, Any]) -> Iterator[Chart]:
        mean = {"name": "reward", "measure": "reward/mean", "values": self._columns.series(ALL, "reward/mean")}
        for line in self._lines(row["over"]):
            if sum(None not in pair for pair in zip(line["values"], mean["values"], strict=True)) > 1:
                note = "a point for each step, the first ones light"
                yield _chart(row["title"].format(each=line["name"]), [mean], note=note) | {
                    "over": line["values"],
                    "across": row["across"],
                }

    def outcomes(self) -> list[Chart]:
        """Return how many rollouts met each outcome, whatever filter or error it was."""
        bars = []
        for outcome, place in OUTCOMES.items():
            names = [name for name in self._measures if f"{name}/".startswith(f"accounting/{outcome}/")]
            columns = [self._columns.series("", name) for name in names]
            values = [None if None in counts else sum(counts) for counts in zip(*columns, strict=True)]
            measure = names[0] if len(names) == 1 else None
            bars.append({"name": outcome, "measure": measure, "values": values, "kind": "bars", "place": place})
        return [_chart("Outcomes", bars, zero=True, unit="rollouts", note="rollouts by outcome")]


def _held_out(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Return the averages of evaluations as points with their intervals, over the versions of policies."""
    named: dict[str, dict[int, dict[str, Any]]] = {}
    for evaluation in evaluations:
        for score in evaluation["scores"]:
            name = f"{evaluation['set']}/{score['environment']}" if evaluation["set"] else score["environment"]
            named.setdefault(name, {})[evaluation["version"]] = score
    versions = sorted({version for own in named.values() for version in own})
    if not versions:
        return []
    series = []
    for name, own in sorted(named.items()):
        scores = [own.get(version) for version in versions]
        intervals = [(score or {}).get("interval") or {} for score in scores]
        values = [score["average"] if score else None for score in scores]
        ends = {end: [interval.get(end) for interval in intervals] for end in ("low", "high")}
        series.append({"name": name, "values": values, **ends, "kind": "points"})
    # As wide as the steps, so that a curve of few evaluations can be held against the others.
    last = max([*versions, *(each.step + 1 for each in steps)])
    chart = _chart("Held-out average", series, note="95% intervals, by policy")
    return [chart | {"versions": versions, "last": last, "across": "policy"}]


def _gaps(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> Iterator[Chart]:
    """Yield the reward in training beside that on held-out examples, by environment, over the versions of policies.

    Step N is sampled with policy N, or one just before it; the last policy is held against the last step.
    """
    training = {each.step: each for each in steps} if evaluations else {}
    for name in sorted({score["environment"] for each in evaluations for score in each["scores"]}):
        scores = {
            each["version"]: score["average"]
            for each in evaluations
            for score in each["scores"]
            if score["environment"] == name
        }
        versions = sorted({*training, *scores})
        rewards = [training[v].value("reward/mean", name) if v in training else None for v in versions]
        held = [scores.get(v) for v in versions]
        last = last_value(rewards)
        beside = [last if v > max(training, default=0) else own for v, own in zip(versions, rewards, strict=True)]
        gap = [a - b if a is not None and b is not None else None for a, b in zip(beside, held, strict=True)]
        series = [
            {"name": "training", "measure": "reward/mean", "values": rewards},
            {"name": "held-out", "values": held, "kind": "points"},
            {"name": "gap", "values": gap, "kind": "points"},
        ]
        if last_value(gap) is not None:
            note = "the gap is training minus held-out"
            chart = _chart(f"Training and held-out: {name}", series, zero=True, note=note)
            yield chart | {"versions": versions, "across": "policy", "of_steps": True}


def _chart(title: str, series: Iterable[Series], zero: bool = False, unit: str = "", note: str = "") -> Chart:
    return {"title": title, "note": note, "zero": zero, "unit": unit, "series": _with_values(series)}


def _with_values(series: Iterable[Series]) -> list[Series]:
    """Return the series that have a value."""
    return [each for each in series if any(value is not None for value in each["values"])]


def last_value(values: Sequence[float | None]) -> float | None:
    """Return the last value that is known; None where none is."""
    return next((value for value in reversed(values) if value is not None), None)

"""Which charts a run has, and what is in each: chosen by what was measured, as plain values."""

from collections.abc import Iterable, Sequence
from typing import Any

from flows.queries.metrics import StepNumbers
from flows.queries.views import EXPIRED
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED
from tasks.metrics.figures import ALL
from tasks.metrics.rollouts import SPANS
from tasks.stages import STEP_STAGES

OUTCOMES = {
    **{TRAINED: 2, FILTERED: 4, ERRORED: 6, STOPPED: 7, STALE: 7, NO_WEIGHT: 0},
    **{QUARANTINED: 3, PENDING: 5, REFUSED: 1, EXPIRED: 7},
}
"""The outcomes of rollouts, from the foot of the bars up, each with the number of its colour."""
Series = dict[str, Any]
Chart = dict[str, Any]


def charts(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sections of charts; a chart without any value is left out. `evaluations` are those of `held_out`."""
    made = _Charts(steps)
    held = _held_out(steps, evaluations)
    sections = (
        ("Reward", [*made.reward(), *held, *_gaps(steps, evaluations), *made.environment_measures()]),
        ("Reward against", made.against_reward()),
        ("Training", made.training()),
        ("Rollouts", made.rollouts()),
        ("Time", made.time()),
    )
    return [{"title": title, "charts": [each for each in found if each["series"]]} for title, found in sections]


class _Charts:
    """The numbers of a run's steps, taken together into charts."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self._steps = steps
        names = {name for each in steps for name in each.values}
        self._measures = sorted({measure for _, measure in names})
        self._scopes = sorted({scope for scope, _ in names} - {"", ALL})
        self._several = len(self._scopes) > 1

    def reward(self) -> list[Chart]:
        """Reward of all, by environment and by agent."""
        spread = self._one("reward/mean", ALL, "mean")
        for one, sign in (("low", -1.0), ("high", 1.0)):
            deviations = self._values("reward/std", ALL)
            spread[one] = [_shift(m, d, sign) for m, d in zip(spread["values"], deviations, strict=True)]
        ends = [self._one("reward/max", ALL, "highest"), self._one("reward/min", ALL, "lowest")]
        return [
            _chart("Reward", [spread], "mean and one standard deviation"),
            _chart("Reward by environment", self._by_scope("reward/mean") if self._several else []),
            _chart("Reward parts", self._parts(), "mean score of each, without its weight"),
            *(_chart(f"Reward by agent: {scope}", self._agents(scope)) for scope in self._scopes),
            _chart("Highest and lowest reward", ends),
        ]

    def against_reward(self) -> list[Chart]:
        """Reward against length, entropy and its parts: a point for each step."""
        over = [
            ("length", "tokens", self._values("num_output_tokens", ALL)),
            ("entropy", "nats", self._values("updates/entropy/mean", "")),
            *((f"its part {each['name']}", "score", each["values"]) for each in self._parts()),
        ]
        mean = self._one("reward/mean", ALL, "reward")
        return [
            _chart(f"Reward against {name}", [mean], "a point for each step, the first ones light")
            | {"over": values, "across": unit}
            for name, unit, values in over
            if sum(None not in pair for pair in zip(values, mean["values"], strict=True)) > 1
        ]

    def _parts(self) -> list[Series]:
        names = [each for each in self._measures if each.startswith("rewards/") and each.endswith("/mean")]
        return _with_values(self._one(name, ALL, name[len("rewards/") : -len("/mean")]) for name in names)

    def environment_measures(self) -> list[Chart]:
        """What environments measured beside the reward."""
        names = [each for each in self._measures if each.startswith("metrics/")]
        return [_chart(name.partition("/")[2], self._all_scopes(name), "measured by the environment") for name in names]

    def rollouts(self) -> list[Chart]:
        """Lengths, turns, filters, errors, staleness."""
        longest = [self._one("num_output_tokens", ALL, "mean"), self._one("longest_output", ALL, "longest")]
        return [
            _chart("Sampled tokens of a rollout", longest, zero=True, unit="tokens"),
            _chart("Sampled tokens by environment", self._by_scope("num_output_tokens") if self._several else []),
            _chart("Trainable share", self._all_scopes("trainable/ratio"), "of rollouts, left to train on", zero=True),
            _chart("Outcomes", self._outcomes(), "rollouts by outcome", zero=True, unit="rollouts"),
            _chart("Found by filters", self._under("filters/"), "share of rollouts, enforced or not", zero=True),
            _chart("Errors", self._errors(), "share of rollouts by class", zero=True),
            _chart("Truncated share", self._all_scopes("is_truncated"), "of rollouts", zero=True),
            _chart("Turns of a rollout", self._all_scopes("num_turns"), "mean", zero=True, unit="turns"),
            _chart("Staleness", self._all_scopes("staleness"), "steps since the policy that sampled", zero=True),
            _chart("Rollouts", self._all_scopes("rollouts"), "that ended", zero=True),
        ]

    def training(self) -> list[Chart]:
        """Loss and its parts, gradient, entropy, mismatch, masked share, learning rate."""
        several = any((each.value("updates") or 1) > 1 for each in self._steps)
        parts = [self._one(f"updates/{name}_loss/mean", "", name) for name in ("rl", "ce", "ref_kl")]
        used = [part for part in parts if any(value for value in part["values"])]
        mismatch, masked = (self._updates(name, several) for name in ("mismatch_kl", "masked_fraction"))
        highest = [self._one("update/mismatch_kl_max", "", "highest")]
        tokens = [
            self._one("updates/num_tokens", "", "packed"),
            self._one("updates/weighted_tokens", "", "with a weight"),
        ]
        note = "mean, lowest and highest of a step's updates" if several else ""
        return [
            _chart("Entropy", [self._updates("entropy", several)], "nats a token", zero=True, unit="nats"),
            _chart("Mismatch KL", [mismatch], "nats a token, engine against learner", zero=True, unit="nats"),
            _chart("Highest mismatch", highest, "of a token, nats", zero=True, unit="nats"),  # else it hides the mean
            _chart("Gradient norm", [self._updates("grad_norm", several)], note or "before clipping", zero=True),
            _chart("Loss", [self._updates("loss", several)], note),
            _chart("Loss by component", used if len(used) > 1 else []),
            _chart("Masked share", [masked], "of rl tokens, outside the trust region", zero=True),
            _chart("Learning rate", [self._one("update/learning_rate", "", "rate")], zero=True),
            _chart("Trained tokens", tokens, "of a step", zero=True, unit="tokens"),
        ]

    def time(self) -> list[Chart]:
        """Seconds by stage, of a rollout, and tokens a second."""
        found = {each.rpartition("/")[2] for each in self._measures if each.startswith("timing/stage/")}
        stages = [each for each in STEP_STAGES if each in found]
        spans = [self._one(f"timing/{span}", ALL, span) for span in SPANS]
        speeds = [each for each in self._measures if each.startswith("tokens_per_second/")]
        by_stage = [{**self._one(f"timing/stage/{stage}", "", stage), "kind": "bars"} for stage in stages]
        rates = [self._one(name, "", name.rpartition("/")[2]) for name in speeds if not name.endswith("packing")]
        return [
            _chart("Seconds by stage", by_stage, "of shared work those of the other run", zero=True, unit="s"),
            _chart("Seconds of a rollout", spans, "mean wall-clock", zero=True, unit="s"),
            _chart("Tokens a second", rates, "of a stage", zero=True, unit="tokens/s"),
        ]

    def _values(self, measure: str, scope: str) -> list[float | None]:
        return [each.value(measure, scope) for each in self._steps]

    def _one(self, measure: str, scope: str, name: str) -> Series:
        return {"name": name, "measure": measure, "values": self._values(measure, scope)}

    def _all_scopes(self, measure: str) -> list[Series]:
        """Return a measure of all rollouts, and by environment where there are several."""
        return [self._one(measure, ALL, ALL), *(self._by_scope(measure) if self._several else [])]

    def _by_scope(self, measure: str) -> list[Series]:
        """Return a measure by environment, each at the same place in all charts, the first being that of all."""
        return [self._one(measure, scope, scope) | {"place": n + 1} for n, scope in enumerate(self._scopes)]

    def _agents(self, scope: str) -> list[Series]:
        known = {"reward/mean", "reward/std", "reward/min", "reward/max"}
        names = [each for each in self._measures if each.startswith("reward/") and each not in known]
        return _with_values(self._one(name, scope, name[len("reward/") : -len("/mean")]) for name in names)

    def _under(self, begin: str) -> list[Series]:
        names = [each for each in self._measures if each.startswith(begin)]
        found = _with_values(self._one(name, ALL, _words(name[len(begin) :])) for name in names)
        # Filters that never found anything are left out; where none did, one line at zero says so.
        return [each for each in found if any(each["values"])] or found[:1]

    def _outcomes(self) -> list[Series]:
        """Return how many rollouts met each outcome, whatever filter or error it was; 0 in a step where none did."""
        found = []
        for outcome, place in OUTCOMES.items():
            names = [each for each in self._measures if (each + "/").startswith(f"accounting/{outcome}/")]
            counts = [[each.value(name) for name in names] for each in self._steps]
            values = [sum(each or 0.0 for each in own) for own in counts]
            measure = names[0] if len(names) == 1 else None
            found += (
                [{"name": outcome, "measure": measure, "values": values, "kind": "bars", "place": place}]
                if names
                else []
            )
        return found

    def _errors(self) -> list[Series]:
        classes = [each for each in self._measures if each.startswith("errored_rollout/")]
        found = [self._one("errored_rollout", ALL, "all"), *(self._with_zeros(each) for each in classes)]
        return [*found, *(self._with_zeros(each) for each in ("stragglers", "stale") if each in self._measures)]

    def _with_zeros(self, measure: str) -> Series:
        """Return a share that has no entry where it is zero."""
        known = self._values("rollouts", ALL)
        shares = zip(self._values(measure, ALL), known, strict=True)
        # As in tables of metrics: nothing is written of a class of errors that nobody met.
        values = [0.0 if share is None and count is not None else share for share, count in shares]
        return {"name": measure.rpartition("/")[2], "measure": measure, "values": values}

    def _updates(self, name: str, several: bool) -> Series:
        found = self._one(f"updates/{name}/mean", "", name.replace("_", " "))
        if several:
            found |= {"low": self._values(f"updates/{name}/min", ""), "high": self._values(f"updates/{name}/max", "")}
        return found


def _held_out(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Return the averages of evaluations as points with their intervals, over the versions of policies."""
    named: dict[str, dict[int, dict[str, Any]]] = {}
    for each in evaluations:
        for score in each["scores"]:
            name = f"{each['set']}/{score['environment']}" if each["set"] else score["environment"]
            named.setdefault(name, {})[each["version"]] = score
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
    return [
        _chart("Held-out average", series, "95% intervals, by policy")
        | {"versions": versions, "last": last, "across": "policy"}
    ]


def _gaps(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Return the reward in training beside that on held-out examples, by environment, over the versions of policies.

    Step N is sampled with policy N, or one just before it; the last policy is held against the last step.
    """
    training = {each.step: each for each in steps} if evaluations else {}
    found = []
    for name in sorted({score["environment"] for each in evaluations for score in each["scores"]}):
        scores = {
            each["version"]: score for each in evaluations for score in each["scores"] if score["environment"] == name
        }
        versions = sorted({*training, *scores})
        rewards = [training[v].value("reward/mean", name) if v in training else None for v in versions]
        held = [scores[v]["average"] if v in scores else None for v in versions]
        last = last_value(rewards)
        beside = [last if v > max(training, default=0) else own for v, own in zip(versions, rewards, strict=True)]
        gap = [a - b if a is not None and b is not None else None for a, b in zip(beside, held, strict=True)]
        series = [
            {"name": "training", "measure": "reward/mean", "values": rewards},
            {"name": "held-out", "values": held, "kind": "points"},
            {"name": "gap", "values": gap, "kind": "points"},
        ]
        if last_value(gap) is not None:
            made = _chart(f"Training and held-out: {name}", series, "the gap is training minus held-out", zero=True)
            found.append(made | {"versions": versions, "across": "policy", "of_steps": True})
    return found


def _chart(title: str, series: Iterable[Series], note: str = "", zero: bool = False, unit: str = "") -> Chart:
    return {"title": title, "note": note, "zero": zero, "unit": unit, "series": _with_values(series)}


def _with_values(series: Iterable[Series]) -> list[Series]:
    """Return the series that have a value."""
    return [each for each in series if any(value is not None for value in each["values"])]


def _words(name: str) -> str:
    """Return the name of a filter, or of the share that any of them left out, as words."""
    return "left out" if name == "is_filtered" else name.replace("_", " ")


def _shift(mean: float | None, deviation: float | None, sign: float) -> float | None:
    return None if mean is None or deviation is None else mean + sign * deviation


def last_value(values: Sequence[float | None]) -> float | None:
    """Return the last value that is known; None where none is."""
    return next((value for value in reversed(values) if value is not None), None)

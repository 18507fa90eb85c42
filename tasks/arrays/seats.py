"""Which of the agents (seats) of an environment are trained, and which of them an evaluation counts.

A trace says whether its tokens are the policy's (`trainable`). Of those, the judge's teach nothing, since its reward is
zero by construction; and where an environment trains one learner in each episode, the others' are left out too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from configs.environments import EnvironmentConfig, SeatRule
from tasks.arrays.columns import texts
from tasks.arrays.finding import Finding, Flags, hits_from

JUDGE, OTHER_SEAT = "judge", "other_seat"
"""Reasons of verdicts on seats that are not trained: the judge, by its agent's name, and others than the learner."""
LEARNER_SEAT = "learner_seat"
"""Field of a trace's info with the name of the agent that is trained in its episode."""
COLUMNS = ("trace_id", "environment", "agent", "trainable", "error_class", "info")
NO_RULES: Mapping[str, SeatRule] = {}


class LearnerSeatMissing(ValueError):
    """A rollout does not say which agent is to be trained, and its environment's config asks that it does."""


@dataclass(frozen=True)
class SeatRules:
    """Which trainable traces are of seats that are not trained."""

    judge: Finding
    other: Finding
    unknown: Flags = field(repr=False)
    """Those that failed before they said which seat learns; they count as failures of the one that does."""

    @property
    def dropped(self) -> Flags:
        """Per trace: whether its seat is left out."""
        return self.judge.hits | self.other.hits


def seat_rules(traces: pa.Table, rules: Mapping[str, SeatRule] = NO_RULES) -> SeatRules:
    """Return which seats are left out, by the rules of their environments; without one, the judge is.

    Raises LearnerSeatMissing for a faultless trace without `learner_seat` where that decides.
    """
    judges: dict[int, dict[str, str]] = {}
    others: dict[int, dict[str, str]] = {}
    unknown = np.zeros(traces.num_rows, np.bool_)
    for row, trace in enumerate(traces.select(list(COLUMNS)).to_pylist()):
        rule = rules.get(trace["environment"], SeatRule())
        if not trace["trainable"]:
            continue
        if rule.drop_judge and trace["agent"] == JUDGE:
            judges[row] = {"agent": JUDGE}
        elif rule.learner_seat:
            learner = json.loads(trace["info"]).get(LEARNER_SEAT)
            if not isinstance(learner, str):
                unknown[row] = _has_failed(trace)
            elif learner != trace["agent"]:
                others[row] = {LEARNER_SEAT: learner}
    return SeatRules(hits_from(judges, traces.num_rows), hits_from(others, traces.num_rows), unknown)


def _has_failed(trace: Mapping[str, object]) -> bool:
    """Return True for a failed trace; raise LearnerSeatMissing for a faultless one."""
    if trace["error_class"] is None:
        raise LearnerSeatMissing(
            f"table traces, column info: trace {trace['trace_id']} of environment {trace['environment']!r}, agent "
            f"{trace['agent']!r}, has no {LEARNER_SEAT!r}, and that environment trains only the agent named there. "
            "Nothing was trained; all that was sampled is safe. Set learner_seat = false for that environment, or take "
            "one that writes the name into every trace's info"
        )
    return True


def trained_seats(traces: pa.Table, rules: Mapping[str, SeatRule] = NO_RULES) -> pa.Table:
    """Return the traces of seats that are trained, as far as they say; raises LearnerSeatMissing."""
    found = seat_rules(traces, rules)
    return traces.filter(pa.array(~found.dropped & ~found.unknown))


def evaluated_seats(traces: pa.Table, environments: Iterable[EnvironmentConfig]) -> pa.Table:
    """Return the traces that an evaluation counts, in order: one for each attempt at an example by one seat.

    Those are the trainable ones that the seat rules leave; where an environment has an `evaluation_seat`, those of that
    agent only, whichever seat would be trained in their episodes. An episode that failed before any trace of such a
    seat was made counts by its first failed trace: leaving it out would make a policy look better than it is. Raises
    LearnerSeatMissing.
    """
    settings = {each.name: each for each in environments}
    found = seat_rules(traces, {name: each.seat_rule for name, each in settings.items()})
    counts = traces["trainable"].to_numpy().astype(np.bool_) & ~found.judge.hits
    named = np.ones(traces.num_rows, np.bool_)
    columns = (texts(traces[name]) for name in ("environment", "agent", "episode_id"))
    rows = list(zip(*columns, strict=True))
    for row, (environment, agent, _) in enumerate(rows):
        seat = settings[environment].evaluation_seat if environment in settings else ""
        counts[row] &= bool(seat) or not found.other.hits[row]
        named[row] = agent == seat if seat else not found.unknown[row]
    failed = traces["error_class"].is_valid().to_numpy()
    seen = {rows[row][2] for row in np.flatnonzero(counts & named)}
    # Episodes that failed before such a seat had a trace: one failed attempt each, however many traces they left.
    for row in np.flatnonzero(counts & ~named & failed):
        if (episode := rows[row][2]) not in seen:
            named[row] = True
            seen.add(episode)
    return traces.filter(pa.array(counts & named))

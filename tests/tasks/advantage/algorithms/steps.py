"""Steps for hypothesis: traces of several groups in any order, of every shape that a rollout may have."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fixtures.builders import exchange, failed, message, trace, verdict
from tests.fixtures.stages import forked

Row = dict[str, Any]

THOUSANDTHS = st.sampled_from((0, 1000, 1000, -1000)) | st.integers(-3000, 3000)
OUTCOMES = ("kept", "kept", "kept", "kept", "unrewarded", "errored", "filtered", "truncated")
SHAPES = ("exchange", "exchange", "forked", "masked", "empty")


@dataclass(frozen=True)
class Step:
    """The rows of a step, as the advantage stage reads them."""

    traces: list[Row]
    messages: list[Row]
    verdicts: list[Row]

    @property
    def kept(self) -> list[Row]:
        """The traces that are kept."""
        names = {row["trace_id"] for row in self.verdicts if row["keep"]}
        return [row for row in self.traces if row["trace_id"] in names]

    def ordered(self, order: list[int]) -> "Step":
        """Return the same step with its traces in another order."""
        traces = [self.traces[i] for i in order]
        return Step(traces, self.messages, self.verdicts)

    def rewarded(self, change: Any) -> "Step":
        """Return the same step with every reward that there is changed by a function."""
        traces = [row | {"reward": None if row["reward"] is None else change(row["reward"])} for row in self.traces]
        return Step(traces, self.messages, self.verdicts)


def steps(*, seats: bool = False, rewards: st.SearchStrategy[int] = THOUSANDTHS) -> st.SearchStrategy[Step]:
    """Draw a step of up to eight traces; with `seats`, of proposers and solvers in several episodes."""
    lengths = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4))
    one = st.tuples(st.integers(0, 2), rewards, st.sampled_from(OUTCOMES), st.sampled_from(SHAPES), lengths)
    seat = st.tuples(st.sampled_from(("proposer", "solver")), st.integers(0, 1)) if seats else st.none()
    return st.lists(st.tuples(one, seat), min_size=1, max_size=8).map(_step)


def _step(drawn: list[tuple[Any, Any]]) -> Step:
    step = Step([], [], [])
    for number, ((group, reward, outcome, shape, lengths), seat) in enumerate(drawn):
        name, columns = f"t{number}", {"group_id": f"g{group}"}
        columns |= dict(zip(("num_output_tokens", "num_input_tokens", "num_turns"), lengths, strict=True))
        if seat is not None:
            columns |= {"agent": seat[0], "episode_id": f"g{group}-{seat[1]}"}
        row = (failed if outcome == "errored" else trace)(name, **columns, reward=reward / 1000)
        row |= {"unrewarded": {"reward": None}, "truncated": {"is_truncated": True}}.get(outcome, {})
        reason = {"errored": "errored", "filtered": "gibberish"}.get(outcome)
        step.traces.append(row)
        step.messages.extend(_messages(name, shape))
        step.verdicts.append(verdict(name, group_id=f"g{group}", reason=reason))
    return step


def _messages(name: str, shape: str) -> list[Row]:
    """Return a trace's messages; `masked` has no sampled token, `empty` an answer without any token."""
    if shape == "forked":
        return forked(name)
    if shape == "masked":
        return [message(name, 0)]
    return exchange(name, completion=() if shape == "empty" else (4, 5))

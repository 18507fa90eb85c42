"""Every algorithm that compares groups: against a slow reference on any step.

The reference goes by one trace and one token at a time, in fractions and not in floats. Rewards are in thousandths, so
that a mean of zero is zero there whatever rounding makes of it elsewhere.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.builders import exchange, failed, message, trace, verdict
from tests.fixtures.stages import credited, forked


def slow_credit(kept, section):
    """Return the baseline and advantage of each kept trace under an algorithm's section, or None, by trace id."""
    groups = defaultdict(list)
    for row in kept:
        if row["reward"] is not None:
            groups[_key(row, section)].append(row)
    credits = {row["trace_id"]: None for row in kept}
    centred = {}
    for members in groups.values():
        rewards = [slow_reward(row, members, section) for row in members]
        mean = sum(rewards) / len(rewards)
        for row, reward in zip(members, rewards, strict=True):
            centred[row["trace_id"]] = reward - mean
            credits[row["trace_id"]] = _one(reward, rewards, mean, section)
    if section["type"] == "reinforce_pp" and centred:
        overall = sum(centred.values()) / len(centred)
        spread = math.sqrt(sum((value - overall) ** 2 for value in centred.values()) / len(centred))
        for name, value in centred.items():
            credits[name] = (credits[name][0], float(value - overall) / (spread + section.get("epsilon", 1e-6)))
    return credits


def _key(row, section):
    if section["type"] != "hierarchical_grpo":
        return (row["group_id"],)
    alone = row["agent"] in section.get("episode_agents", ("solver",))
    return (row["group_id"], row["agent"], *([row["episode_id"]] if alone else []))


def _one(reward, rewards, mean, section):
    if section["type"] == "rloo":
        if len(rewards) == 1:
            return None
        others = (sum(rewards) - reward) / (len(rewards) - 1)
        return float(others), float(reward - others)
    if section["type"] == "max_rl":
        return float(mean), float((reward - mean) / mean) if mean > 0 else 0.0
    if section.get("normalise_std"):
        spread = math.sqrt(sum((one - mean) ** 2 for one in rewards) / len(rewards))
        return float(mean), float(reward - mean) / (spread + section.get("epsilon", 1e-6))
    return float(mean), float(reward - mean)


def slow_reward(row, members, section):
    """Return the shaped reward of one member of a comparison group."""
    reward = exact(row["reward"])
    if (penalty := section.get("length_penalty")) is not None:
        passing = exact(penalty.get("passing", 1.0))
        rate = Fraction(sum(exact(one["reward"]) >= passing for one in members), len(members))
        for name, default, column in (
            ("output", 0.25, "num_output_tokens"),
            ("input", 0.1, "num_input_tokens"),
            ("turns", 0.1, "num_turns"),
        ):
            longest = max(one[column] for one in members)
            if longest:
                reward -= rate * exact(penalty.get(name, default)) * Fraction(row[column], longest)
    if (overlong := section.get("overlong")) is not None:
        start = overlong["max_tokens"] - overlong["buffer_tokens"]
        share = Fraction(row["num_output_tokens"] - start, overlong["buffer_tokens"])
        reward -= exact(overlong.get("penalty", 1.0)) * min(max(share, Fraction(0)), Fraction(1))
    return reward


def exact(value):
    """Return the number of thousandths that a float was written as."""
    return Fraction(round(value * 1000), 1000)


def slow_streams(trace_id, messages, worth):
    """Return rl weights and advantages of every sample of a trace, token by token, by sample id.

    Samples are the paths to leaves, in the order of the leaves; a token that several share counts in the first.
    """
    rows = {row["message"]: row for row in messages if row["trace_id"] == trace_id}
    parents = {row["parent"] for row in rows.values()}
    seen = set()
    found = {}
    for number, leaf in enumerate(sorted(rows.keys() - parents)):
        path = []
        step = leaf
        while step is not None:
            path.insert(0, step)
            step = rows[step]["parent"]
        weights = []
        for step in path:
            trains = worth is not None and step not in seen
            weights += [float(sampled and trains) for sampled in rows[step]["mask"]]
            seen.add(step)
        found[f"{trace_id}/{number}"] = (weights, [weight * (worth[1] if worth else 0.0) for weight in weights])
    return found


THOUSANDTHS = st.sampled_from((0, 1000, 1000, -1000)) | st.integers(-3000, 3000)
OUTCOMES = ("kept", "kept", "kept", "kept", "unrewarded", "errored", "filtered", "truncated")
SHAPES = ("exchange", "exchange", "forked", "masked", "empty")


@dataclass(frozen=True)
class Step:
    """The rows of a step, as the advantage stage reads them."""

    traces: list
    messages: list
    verdicts: list

    @property
    def kept(self):
        """The traces that are kept."""
        names = {row["trace_id"] for row in self.verdicts if row["keep"]}
        return [row for row in self.traces if row["trace_id"] in names]


def steps(*, seats=False):
    """Draw a step of up to eight traces; with `seats`, of proposers and solvers in several episodes."""
    lengths = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4))
    one = st.tuples(st.integers(0, 2), THOUSANDTHS, st.sampled_from(OUTCOMES), st.sampled_from(SHAPES), lengths)
    seat = st.tuples(st.sampled_from(("proposer", "solver")), st.integers(0, 1)) if seats else st.none()
    return st.lists(st.tuples(one, seat), min_size=1, max_size=8).map(_step)


def _step(drawn):
    step = Step([], [], [])
    for number, ((of, reward, outcome, shape, lengths), seat) in enumerate(drawn):
        name, columns = f"t{number}", {"group_id": f"g{of}"}
        columns |= dict(zip(("num_output_tokens", "num_input_tokens", "num_turns"), lengths, strict=True))
        if seat is not None:
            columns |= {"agent": seat[0], "episode_id": f"g{of}-{seat[1]}"}
        row = (failed if outcome == "errored" else trace)(name, **columns, reward=reward / 1000)
        row |= {"unrewarded": {"reward": None}, "truncated": {"is_truncated": True}}.get(outcome, {})
        reason = {"errored": "errored", "filtered": "gibberish"}.get(outcome)
        step.traces.append(row)
        step.messages.extend(_messages(name, shape))
        step.verdicts.append(verdict(name, group_id=f"g{of}", reason=reason))
    return step


def _messages(name, shape):
    """Return a trace's messages; `masked` has no sampled token, `empty` an answer without any token."""
    if shape == "forked":
        return forked(name)
    if shape == "masked":
        return [message(name, 0)]
    return exchange(name, completion=() if shape == "empty" else (4, 5))


KINDS = ("grpo", "dr_grpo", "rloo", "max_rl", "reinforce_pp", "hierarchical_grpo")
SHAPING = st.fixed_dictionaries(
    {},
    optional={
        "length_penalty": st.sampled_from(
            ({}, {"output": 0.5, "input": 0.0, "turns": 0.3, "passing": 0.5}, {"passing": 3.5})  # nothing passes
        ),
        "overlong": st.sampled_from(
            ({"max_tokens": 10, "buffer_tokens": 4, "penalty": 0.5}, {"max_tokens": 8, "buffer_tokens": 8})
        ),
    },
)


def against_reference(step, section):
    """Compare the credits of a step, sample by sample and token by token."""
    expected = slow_credit(step.kept, section)
    rows = credited(step.traces, step.messages, step.verdicts, **section)
    streams = {
        sample: (name, *found)
        for name, worth in expected.items()
        for sample, found in slow_streams(name, step.messages, worth).items()
    }
    assert {row["sample_id"] for row in rows} == set(streams)
    for row in rows:
        name, weights, advantages = streams[row["sample_id"]]
        if (worth := expected[name]) is None:
            assert row["baseline"] is None and row["advantage"] is None
        else:
            assert (row["baseline"], row["advantage"]) == pytest.approx(worth, rel=1e-9, abs=1e-9)
        assert row["rl_weights"] == weights
        assert row["advantages"] == pytest.approx(advantages, rel=1e-6, abs=1e-6)
        assert not any(row["ce_weights"]) and not any(row["ref_kl_weights"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_any_step_is_credited_as_one_trace_at_a_time_says(kind, data):
    step = data.draw(steps(seats=kind == "hierarchical_grpo"))
    against_reference(step, {"type": kind} | data.draw(SHAPING))


@settings(max_examples=15)
@given(step=steps(), epsilon=st.sampled_from((1e-6, 0.5)))
def test_grpo_with_standard_deviations_too(step, epsilon):
    against_reference(step, {"type": "grpo", "normalise_std": True, "epsilon": epsilon})

"""A slow reference of everything that compares groups: one trace and one token at a time, in fractions, not in floats.

Rewards are in thousandths, so that a mean of zero is zero here whatever rounding makes of it elsewhere.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

Row = dict[str, Any]
Worth = tuple[float, float] | None
"""Baseline and advantage; None is none."""


def slow_credit(kept: Sequence[Row], section: Mapping[str, Any]) -> dict[str, Worth]:
    """Return what each kept trace is worth under an algorithm's section, by trace id."""
    groups = defaultdict(list)
    for row in kept:
        if row["reward"] is not None:
            groups[_key(row, section)].append(row)
    credits: dict[str, Worth] = {row["trace_id"]: None for row in kept}
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


def _key(row: Row, section: Mapping[str, Any]) -> tuple[str, ...]:
    if section["type"] != "hierarchical_grpo":
        return (row["group_id"],)
    alone = row["agent"] in section.get("episode_agents", ("solver",))
    return (row["group_id"], row["agent"], *([row["episode_id"]] if alone else []))


def _one(reward: Fraction, rewards: Sequence[Fraction], mean: Fraction, section: Mapping[str, Any]) -> Worth:
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


def slow_reward(row: Row, members: Sequence[Row], section: Mapping[str, Any]) -> Fraction:
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


def exact(value: float) -> Fraction:
    """Return the number of thousandths that a float was written as."""
    return Fraction(round(value * 1000), 1000)


def slow_streams(trace_id: str, messages: Sequence[Row], worth: Worth) -> dict[str, tuple[list[float], list[float]]]:
    """Return rl weights and advantages of every sample of a trace, token by token, by sample id.

    Samples are the paths to leaves, in the order of the leaves; a token that several share counts in the first.
    """
    own = {row["message"]: row for row in messages if row["trace_id"] == trace_id}
    parents = {row["parent"] for row in own.values()}
    seen: set[int] = set()
    found = {}
    for number, leaf in enumerate(sorted(name for name in own if name not in parents)):
        path = []
        step: int | None = leaf
        while step is not None:
            path.insert(0, step)
            step = own[step]["parent"]
        weights = []
        for step in path:
            for sampled in own[step]["mask"]:
                weights.append(1.0 if sampled and worth is not None and step not in seen else 0.0)
            seen.add(step)
        found[f"{trace_id}/{number}"] = (weights, [weight * (worth[1] if worth else 0.0) for weight in weights])
    return found

"""Rewards of whole groups: values by hand, groups that lost a rollout, and functions that fail."""

import asyncio
import json
import subprocess
import sys
import time

import pytest

from configs.environments import GroupRewardConfig
from tasks.inference.grading.groups import score_groups
from tests.fixtures.builders import example, exchange, failed, trace

FROZEN = {"trainable": False}
OWN = '{"exact":{"score":0.5,"weight":1.0}}'


def distinct(group):
    replies = [rollout.reply for rollout in group]
    return [1 / replies.count(reply) for reply in replies]


async def ranked(group, scale=1):
    await asyncio.sleep(0)
    group.sort(key=str)  # a list of its own: the next function gets another
    return [{"place": scale * place, "size": len(group)} for place, _ in enumerate(group)]


def scored(functions, replies, lost=(), traces=None, **settings):
    """The rows that functions of the same settings scored, by trace, whose replies are given."""
    traces = traces or [trace(name, reward=0.5, rewards=OWN) for name in replies]
    bodies = {name: json.dumps({"role": "assistant", "content": reply}) for name, reply in replies.items()}
    messages = [row for name in replies for row in exchange(name, content=replies[name], body=bodies[name])[::-1]]
    rows = [row | {"seconds": 0.5} for row in traces]
    section = GroupRewardConfig(function="in:place", **settings).model_dump()
    sections = {name: section | {"function": function} for name, function in functions.items()}
    score_groups(sections, ([example()], [*traces, *lost], messages), rows, lambda: None)
    return {row["trace_id"]: row for row in rows}


def test_trainable_rollouts_of_each_group_get_numbers_and_parts_by_name_and_weight():
    others = trace("x", group_id="g1", rewards=OWN), trace("user", trainable=False, rewards=OWN)
    traces = [trace("a", rewards=OWN), trace("b", rewards=OWN), *others]
    replies = {"a": "one", "b": "one", "x": "one", "user": "one"}
    rows = scored({"same": distinct, "best": ranked}, replies, traces=traces, weight=2.0)
    assert [row["reward"] for row in rows.values()] == [0.5 + 0 + 4 + 1, 0.5 + 2 + 4 + 1, 0.5 + 0 + 2 + 2, 1.0]
    parts = {"exact": (0.5, 1.0), "place": (1.0, 2.0), "size": (2.0, 2.0), "same": (0.5, 2.0)}
    assert {name: (*part.values(),) for name, part in json.loads(rows["b"]["rewards"]).items()} == parts


def test_a_function_gets_its_arguments_task_messages_reply_and_rewards():
    seen = []
    asked = [trace("a", reward=0.5, rewards=OWN, metrics='{"m":2}', info='{"i":3}')]
    scored({"r": lambda group, more: seen.extend(group) or more}, {"a": "b"}, traces=asked, arguments={"more": [1]})
    (only,) = seen
    assert (only.task, only.reply, only.reward, only.agent, only.episode_id) == ({}, "b", 0.5, "agent", "episode-a")
    assert only.messages == [{}, {"role": "assistant", "content": "b"}]
    assert (only.rewards, only.metrics, only.info) == (json.loads(OWN), {"m": 2}, {"i": 3})


@pytest.mark.parametrize(
    ("function", "lost", "kind", "error"),
    [
        (distinct, {}, "incomplete", "IncompleteGroup"),
        (distinct, {"error_class": "straggler"}, "straggler", "IncompleteGroup"),
        (distinct, FROZEN, None, None),
        (lambda group: group[5], FROZEN, "environment", "IndexError"),
        (lambda group: [1.0, float("nan")], FROZEN, "environment", "NonFiniteReward"),
        (lambda group: [1.0], FROZEN, "environment", "ValueError"),
        (lambda group: ["1", "1"], FROZEN, "environment", "TypeError"),
        (lambda group: [{"exact": 1.0}] * 2, FROZEN, "environment", "ValueError"),
        (lambda group: time.sleep(60), FROZEN, "timeout", "TimeoutError"),
    ],
)
def test_a_lost_member_and_what_goes_wrong_are_errors_of_every_rollout_and_never_a_zero(function, lost, kind, error):
    place = {"a": function, "b": distinct}, {"a": "one", "b": "two"}, [failed("z", **lost)]
    rows = scored(*place, timeout_seconds=1)
    assert {(row["error_class"], row["error_type"]) for row in rows.values()} == {(kind, error)} and "z" not in rows
    assert {row["reward"] for row in rows.values()} == {None if error else 2.5}
    if error == "IncompleteGroup":
        assert [row["reward"] for row in scored(*place, partial=True).values()] == [2.5, 2.5]


@pytest.mark.engine
@pytest.mark.nightly
def test_a_function_that_no_exception_reaches_ends_its_process():
    settings = "dict(function=lambda group: sum(iter(int, 1)), arguments={}, timeout_seconds=1)"
    code = (
        f"from tasks.inference.grading import groups as g; g.GRACE_SECONDS = 1; g._add_reward('r', {settings}, [], [])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "Timeout" in ended.stderr

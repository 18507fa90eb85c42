"""Constant lengths in the rl denominator: exact weights, and sum(w x) / N as a loop over traces says."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.run import RunConfig
from flows.runtime.pipeline import pack
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.arrays.ragged import Ragged
from tasks.arrays.samples import Samples
from tasks.packing.stage import STAGE, UNCOUNTED, constant_length_factors
from tasks.runtime.stage import Ref
from tests.fixtures import stages
from tests.fixtures.builders import exchange, table, trace, verdict, view
from tests.fixtures.stages import advantage, credited_by, forked, tables_of

DR_GRPO = {"type": "dr_grpo", "length_normaliser": 10}


def packed(traces, messages, algorithm=DR_GRPO, environments=None, verdicts=None, replaced=False, **section):
    """The rows of batches: `environments` are the algorithms of those with one of their own.

    Where groups are `replaced`, packing is given no verdicts."""
    sections = {"algorithm": algorithm, "environments": credited_by(environments or {})}
    tables = tables_of(traces, messages, verdicts)
    tables |= advantage(tables, view(ADVANTAGE, **sections), step=1)
    if replaced:
        del tables["verdicts"]
    return stages.packed(tables, sections, **section)


def answers(**lengths):
    """Messages of traces by name that sample so many tokens, after a prompt of one."""
    return [row for name, length in lengths.items() for row in exchange(name, prompt=[1], completion=[2] * length)]


def test_every_rollout_counts_for_the_constant_however_long_it_is():
    (row,) = packed([trace("a"), trace("b", reward=0.0)], answers(a=2, b=4))
    # 6 weighted tokens, and 2 rollouts of 10: 6 / 20.
    assert row["sample_ids"] == ["b/0", "a/0"]
    assert row["rl_weights"] == pytest.approx([0, 0.3, 0.3, 0.3, 0.3, 0, 0.3, 0.3])
    assert row["rl_tokens"] == 6 and row["advantages"] == [0, -0.5, -0.5, -0.5, -0.5, 0, 0.5, 0.5]
    assert not any(row["ce_weights"]) and not any(row["ref_kl_weights"])


def test_a_sample_that_another_component_alone_weighs_does_not_count():
    counts = {"rl": np.array([2, 0]), "ce": np.array([0, 1]), "ref_kl": np.array([0, 0])}
    path, lengths = Ragged.from_lengths(np.arange(2), [1, 1]), np.array([3, 2])
    samples = Samples(
        ["a/0", "b/0"], ["g", "g"], np.array([0, 1]), path, np.zeros(2, int), lengths, lengths, counts, True
    )
    traces = table("traces", [trace("a"), trace("b")])
    found = constant_length_factors(samples, [np.array([0, 1])], traces, {"": 4}, np.zeros(2, bool))
    assert found.tolist() == [2 / 4, 2 / 4]


def test_other_components_are_left_alone():
    traces = [trace("a"), trace("b", group_id="g1", environment="other")]
    taught = {"other": {"type": "supervised"}}
    (row,) = packed(traces, answers(a=1, b=2), environments=taught, zero_advantages=True)
    assert sorted(set(row["rl_weights"])) == [0, np.float32(1 / 10)] and set(row["ce_weights"]) == {0, 1}
    assert (row["rl_tokens"], row["ce_tokens"]) == (1, 2)
    (only,) = packed(traces[1:], answers(b=2), environments=taught)
    assert set(only["rl_weights"]) == {0} and only["ce_weights"] == [0, 1, 1]


def four_groups():
    """Four groups of two rollouts, of which only the first differs, and their messages."""
    traces = [
        trace(f"{name}{i}", group_id=name, reward=float(i) if name == "g" else 1.0) for name in "ghij" for i in "01"
    ]
    return traces, answers(**{one["trace_id"]: 2 for one in traces})


def verdicts_of(traces, reason):
    """Verdicts that keep the first two traces, and the others without a reason."""
    return [verdict(one["trace_id"], reason=reason if number > 1 else None) for number, one in enumerate(traces)]


@pytest.mark.parametrize(
    ("reason", "denominator"), [("zero_advantage", 80), (None, 80), *((reason, 20) for reason in UNCOUNTED)]
)
def test_rollouts_that_a_filter_dropped_count_and_what_failed_or_is_not_the_policy_s_does_not(reason, denominator):
    """Beside three groups of equal rewards a step is a quarter of what it would be alone, as the paper has it.

    Where nobody drops them it comes to the same: their advantage is zero.
    """
    traces, messages = four_groups()
    (row,) = packed(traces, messages, verdicts=verdicts_of(traces, reason))
    assert row["rl_tokens"] == 4 and set(row["rl_weights"]) == {0, np.float32(4 / denominator)}


def test_a_step_without_rollouts_is_a_batch_without_rows():
    assert packed([], []) == packed([], [], replaced=True) == []


@pytest.mark.parametrize(
    ("number", "change", "replaced", "denominator"),
    [
        (7, {"reward": None}, False, 70),
        (2, {"group_id": "g", "reward": 0.5}, True, 30),  # of the groups that stay; its advantage is zero
    ],
)
def test_a_rollout_without_a_reward_and_groups_that_were_replaced_do_not_count(number, change, replaced, denominator):
    traces, messages = four_groups()
    traces[number] |= change
    (row,) = packed(traces, messages, replaced=replaced)
    assert row["rl_tokens"] == 4 and set(row["rl_weights"]) == {0, np.float32(4 / denominator)}


def test_the_pipeline_gives_verdicts_only_where_they_count():
    done = []

    def execute(task, step, refs):
        done.append([ref.stage for ref in refs])

    made = {name: Ref(name, 0, name, (), 0, 0.0, True) for name in ("rollout", "filtering", "advantage")}
    for sections in ({}, {"algorithm": DR_GRPO}, {"algorithm": DR_GRPO, "assignment": {"refill": True}}):
        execute.config = RunConfig.model_validate(sections)
        pack(execute, 0, (made["rollout"],), made["filtering"], made["advantage"])
    assert done == [["advantage", "rollout"], ["advantage", "filtering", "rollout"], ["advantage", "rollout"]]


def test_without_a_constant_weights_and_keys_are_as_they_were():
    (row,) = packed([trace("a"), trace("b", reward=0.0)], answers(a=2, b=4), {"type": "grpo"})
    assert set(row["rl_weights"]) == {0, 1}
    traces, messages = four_groups()
    (row,) = packed(traces, messages, {"type": "grpo"}, verdicts=verdicts_of(traces, "zero_advantage"))
    assert set(row["rl_weights"]) == {0, 1}
    assert set(view(STAGE).content()) == {"packing"}
    assert view(STAGE, algorithm=DR_GRPO).content()["constant_lengths"] == {"": 10}
    assert view(STAGE, environments=credited_by({"other": DR_GRPO})).content()["constant_lengths"] == {
        "": None,
        "other": 10,
    }


ROLLOUTS = st.tuples(
    st.sampled_from(("g0", "g1", "g2")), st.booleans(), st.integers(0, 5), st.sampled_from((0.0, 1.0, None))
)
"""Group, whether in the other environment, tokens (0 is a forked trace), reward."""


@settings(max_examples=25)
@given(
    drawn=st.lists(ROLLOUTS, min_size=1, max_size=9),
    num_updates=st.integers(1, 3),
    constants=st.sampled_from(((7, None), (None, 7), (7, 900), (1, 1))),
    zeros=st.booleans(),
)
def test_the_loss_is_what_a_loop_over_traces_says(drawn, num_updates, constants, zeros):
    """A loss of x per token, any numbers: sum(w x) / N of the rows is sum(x) / D, token by token and trace by trace."""
    own = dict(zip(("reverse", "other"), constants, strict=True))
    sections = {
        name: {"type": "dr_grpo", "length_normaliser": constant} if constant else {"type": "grpo"}
        for name, constant in own.items()
    }
    traces, messages = [], []
    for number, (group, elsewhere, length, reward) in enumerate(drawn):
        name, environment = f"t{number}", "other" if elsewhere else "reverse"
        traces.append(trace(name, group_id=f"{group}-{environment}", environment=environment, reward=reward))
        messages += forked(name) if length == 0 else exchange(name, prompt=[1], completion=[2] * length)
    section = {"updates_per_step": num_updates, "zero_advantages": zeros}
    rows = packed(traces, messages, sections["reverse"], {"other": sections["other"]}, **section)
    constant = {row["trace_id"]: own[row["environment"]] for row in traces}
    in_rows = {name.partition("/")[0] for row in rows for name in row["sample_ids"]}
    scored = {row["trace_id"] for row in traces if row["reward"] is not None}
    outside = sum(constant[name] or 0 for name in scored - in_rows)
    updates = defaultdict(list)
    for row in rows:
        updates[row["update"]].append(row)
    for update in updates.values():
        total = expected = 0.0
        tokens = defaultdict(int)
        for row in update:
            for sample, (start, end) in zip(row["sample_ids"], pairwise(row["cu_seqlens"]), strict=False):
                for place in range(start, end):
                    x = 1.0 + (place * 37 % 11) * row["advantages"][place]
                    total += row["rl_weights"][place] * x
                    if row["rl_weights"][place]:
                        expected += x
                        tokens[sample.partition("/")[0]] += 1
        denominator = sum(constant[name] or count for name, count in tokens.items()) + outside / len(updates)
        assert row["rl_tokens"] == sum(tokens.values()) > 0
        assert total / row["rl_tokens"] == pytest.approx(expected / denominator, rel=1e-5, abs=1e-6)

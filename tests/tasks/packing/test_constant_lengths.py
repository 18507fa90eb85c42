"""Constant lengths in the rl denominator: exact weights, and sum(w x) / N as a loop over traces says."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.run import RunConfig
from flows.runtime.pipeline import pack
from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import BATCHES
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.arrays.ragged import Ragged
from tasks.arrays.samples import Samples
from tasks.packing.stage import STAGE, UNCOUNTED, constant_length_factors
from tasks.runtime.stage import Ref
from tests.fixtures.builders import exchange, table, trace, verdict, view
from tests.fixtures.stages import advantage, forked, packing, tables_of, written

DR_GRPO = {"type": "dr_grpo", "length_normaliser": 10}


def packed(traces, messages, algorithm=DR_GRPO, environments=(), verdicts=None, replaced=False, **section):
    """The rows of batches: `environments` are (name, algorithm) of those with an algorithm of their own.

    Where groups are `replaced`, packing is given no verdicts."""
    own = [{"name": name, "taskset": {"id": name}, "algorithm": each} for name, each in environments]
    sections = {"algorithm": algorithm, "environments": own, "packing": section}
    tables = tables_of(traces, messages, verdicts)
    tables |= advantage(tables, view(ADVANTAGE, **sections), step=1)
    if replaced:
        del tables["verdicts"]
    batches = written(packing(tables, view(STAGE, **sections)))["batches"]
    check_rows(batches, BATCHES, RowPlace("batches"))
    return batches.to_pylist()


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


def test_each_update_has_its_own_denominator():
    traces = [trace(f"{g}{i}", group_id=g, reward=float(i)) for g in "gh" for i in range(2)]
    first, second = packed(traces, answers(g0=1, g1=2, h0=3, h1=4), updates_per_step=2)
    assert {first["update"], second["update"]} == {0, 1}
    by_group = {row["sample_ids"][0][0]: row for row in (first, second)}
    weights = {name: sorted(set(row["rl_weights"]) - {0}) for name, row in by_group.items()}
    assert weights == {"g": pytest.approx([3 / 20]), "h": pytest.approx([7 / 20])}
    assert (by_group["g"]["rl_tokens"], by_group["h"]["rl_tokens"]) == (3, 7)


def test_a_rollout_of_two_branches_counts_once_and_in_two_updates_twice():
    alone = {"zero_advantages": True}
    (row,) = packed([trace("a")], forked("a"), **alone)
    assert sorted(row["sample_ids"]) == ["a/0", "a/1"] and row["rl_tokens"] == 5
    assert set(row["rl_weights"]) == {0, np.float32(5 / 10)}
    first, second = packed([trace("a")], forked("a"), updates_per_step=2, **alone)
    assert [first["rl_tokens"], second["rl_tokens"]] == [3, 2]
    assert set(first["rl_weights"]) == {0, np.float32(3 / 10)} and set(second["rl_weights"]) == {0, np.float32(2 / 10)}


def test_a_sample_that_another_component_alone_weighs_does_not_count():
    counts = {"rl": np.array([2, 0]), "ce": np.array([0, 1]), "ref_kl": np.array([0, 0])}
    path, lengths = Ragged.from_lengths(np.arange(2), [1, 1]), np.array([3, 2])
    samples = Samples(["a/0", "b/0"], ["g", "g"], np.array([0, 1]), path, np.zeros(2, int), lengths, counts, True)
    traces = table("traces", [trace("a"), trace("b")])
    found = constant_length_factors(samples, [np.array([0, 1])], traces, {"": 4}, np.zeros(2, bool))
    assert found.tolist() == [2 / 4, 2 / 4]


def test_other_components_are_left_alone():
    traces = [trace("a"), trace("b", group_id="g1", environment="other")]
    both = {"zero_advantages": True}
    (row,) = packed(traces, answers(a=1, b=2), DR_GRPO, [("other", {"type": "supervised"})], **both)
    assert sorted(set(row["rl_weights"])) == [0, np.float32(1 / 10)] and set(row["ce_weights"]) == {0, 1}
    assert (row["rl_tokens"], row["ce_tokens"]) == (1, 2)
    only = packed([traces[1]], answers(b=2), DR_GRPO, [("other", {"type": "supervised"})])
    assert set(only[0]["rl_weights"]) == {0} and only[0]["ce_weights"] == [0, 1, 1]


def four_groups():
    """Four groups of two rollouts, of which only the first differs, and their messages."""
    traces = [
        trace(f"{name}{i}", group_id=name, reward=float(i) if name == "g" else 1.0) for name in "ghij" for i in "01"
    ]
    return traces, answers(**{one["trace_id"]: 2 for one in traces})


def test_rollouts_that_a_filter_dropped_count():
    """Beside three groups of equal rewards a step is a quarter of what it would be alone, as the paper has it."""
    traces, messages = four_groups()
    dropped = [verdict(one["trace_id"], reason="zero_advantage") for one in traces[2:]]
    (row,) = packed(traces, messages, verdicts=[*map(verdict, ("g0", "g1")), *dropped])
    assert row["rl_tokens"] == 4 and set(row["rl_weights"]) == {0, np.float32(4 / 80)}
    (alone,) = packed(traces[:2], messages[:4])
    assert set(alone["rl_weights"]) == {0, np.float32(4 / 20)}
    # A gate that refuses them, or nobody at all, comes to the same: their advantage is zero.
    (kept,) = packed(traces, messages)
    assert kept["rl_weights"] == row["rl_weights"]


@pytest.mark.parametrize("reason", UNCOUNTED)
def test_what_failed_or_is_not_the_policy_s_does_not_count(reason):
    traces, messages = four_groups()
    left_out = [verdict(one["trace_id"], reason=reason) for one in traces[2:]]
    (row,) = packed(traces, messages, verdicts=[*map(verdict, ("g0", "g1")), *left_out])
    assert set(row["rl_weights"]) == {0, np.float32(4 / 20)}


def test_a_step_without_rollouts_is_a_batch_without_rows():
    assert packed([], []) == packed([], [], replaced=True) == []


def test_a_rollout_without_a_reward_does_not_count():
    traces, messages = four_groups()
    (row,) = packed([*traces[:7], traces[7] | {"reward": None}], messages)
    assert set(row["rl_weights"]) == {0, np.float32(4 / 70)}


def test_groups_that_were_replaced_do_not_count_and_equals_among_others_do():
    traces, messages = four_groups()
    traces[2] |= {"group_id": "g", "reward": 0.5}  # its advantage is zero
    (row,) = packed(traces, messages, replaced=True)
    assert row["rl_tokens"] == 4 and set(row["rl_weights"]) == {0, np.float32(4 / 30)}


def test_what_was_dropped_counts_in_equal_shares_in_each_update():
    traces = [trace(f"{g}{i}", group_id=g, reward=float(i)) for g in "gh" for i in range(2)]
    traces += [trace(f"k{i}", group_id="k") for i in range(3)]
    rows = packed(traces, answers(g0=1, g1=2, h0=3, h1=4, k0=1, k1=1, k2=1), updates_per_step=2)
    found = {row["sample_ids"][0][0]: max(row["rl_weights"]) for row in rows}
    assert found == {"g": np.float32(3 / 35), "h": np.float32(7 / 35)}


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
    dropped = [verdict(one["trace_id"], reason="zero_advantage") for one in traces[2:]]
    (row,) = packed(traces, messages, {"type": "grpo"}, verdicts=[*map(verdict, ("g0", "g1")), *dropped])
    assert set(row["rl_weights"]) == {0, 1}
    assert set(view(STAGE).content()) == {"packing"}
    other = [{"name": "other", "taskset": {"id": "x"}, "algorithm": DR_GRPO}]
    assert view(STAGE, algorithm=DR_GRPO).content()["constant_lengths"] == {"": 10}
    assert view(STAGE, environments=other).content()["constant_lengths"] == {"": None, "other": 10}


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
    rows = packed(traces, messages, sections["reverse"], [("other", sections["other"])], **section)
    packed_traces = {name.partition("/")[0] for row in rows for name in row["sample_ids"]}
    outside = sum(
        own[row["environment"]] or 0
        for row in traces
        if row["reward"] is not None and row["trace_id"] not in packed_traces
    )
    environment_of = {row["trace_id"]: row["environment"] for row in traces}
    for update in {row["update"] for row in rows}:
        total = expected = denominator = 0.0
        tokens = defaultdict(int)
        for row in (row for row in rows if row["update"] == update):
            for sample, start, end in zip(row["sample_ids"], row["cu_seqlens"], row["cu_seqlens"][1:], strict=False):
                for place in range(start, end):
                    x = 1.0 + (place * 37 % 11) * row["advantages"][place]
                    total += row["rl_weights"][place] * x
                    if row["rl_weights"][place]:
                        expected += x
                        tokens[sample.partition("/")[0]] += 1
            num_tokens = row["rl_tokens"]
        denominator = sum(own[environment_of[name]] or count for name, count in tokens.items())
        denominator += outside / len({row["update"] for row in rows})
        assert num_tokens == sum(tokens.values()) > 0
        assert total / num_tokens == pytest.approx(expected / denominator, rel=1e-5, abs=1e-6)

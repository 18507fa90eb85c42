"""Every algorithm that compares groups, against a loop per trace and token on any step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.stages import credited, group
from tests.tasks.advantage.algorithms.slow_groups import slow_credit, slow_streams
from tests.tasks.advantage.algorithms.steps import Step, steps

KINDS = ("grpo", "dr_grpo", "rloo", "max_rl", "reinforce_pp", "hierarchical_grpo")
SHAPING = st.fixed_dictionaries(
    {},
    optional={
        "length_penalty": st.just({}) | st.just({"output": 0.5, "input": 0.0, "turns": 0.3, "passing": 0.5}),
        "overlong": st.just({"max_tokens": 10, "buffer_tokens": 4, "penalty": 0.5}),
    },
)


def against_reference(step: Step, section: dict) -> None:
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


def test_the_reference_tells_algorithms_apart():
    traces = [*group(1.0, 1.0, 0.0), *group(0.5, 0.0, group_id="g1")]
    answers = {kind: tuple(slow_credit(traces, {"type": kind}).values()) for kind in KINDS}
    assert len(set(answers.values())) == 4 and answers["grpo"] == answers["dr_grpo"] == answers["hierarchical_grpo"]


def test_steps_hold_what_they_should():
    found: list[Step] = []

    @settings(max_examples=60, derandomize=True, database=None)
    @given(step=steps(seats=True))
    def collect(step):
        found.append(step)

    collect()
    assert any(row["message"] == 5 for step in found for row in step.messages)
    assert any(row["error_class"] for step in found for row in step.traces if len(step.kept) > 2)
    kept = [row for step in found for row in step.kept]
    assert any(row["reward"] is None for row in kept) and any(row["is_truncated"] for row in kept)
    assert any(row["reward"] < 0 for row in kept if row["reward"] is not None)
    groups = [[row["group_id"] for row in step.kept] for step in found]
    assert any(order != sorted(order) and len(set(order)) < len(order) for order in groups)

"""A step in parts with whole groups: every stage makes of it what it makes of all of it at once."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.advantage.stage import advantage
from tasks.arrays.group_parts import group_parts
from tasks.filtering.stage import STAGE as FILTERING
from tasks.filtering.stage import filtering
from tasks.packing import stage as packing_stage
from tasks.packing.stage import STAGE as PACKING
from tasks.packing.stage import packing
from tasks.runtime.stored_rows import StoredRows
from tests.fixtures.builders import exchange, failed, table, trace, view
from tests.fixtures.stages import written


def step(groups, seed=0, failing=0.2):
    """Return traces and messages of rollouts, each in a group given by number; of some the rollout failed."""
    rng = np.random.default_rng(seed)
    traces, messages = [], []
    for number, group in enumerate(groups):
        name = f"t{number}"
        if rng.random() < failing:
            traces.append(failed(name, group_id=f"g{group}"))
            continue
        traces.append(trace(name, group_id=f"g{group}", reward=float(rng.integers(3))))
        tokens = rng.integers(0, 200, rng.integers(1, 9)).tolist()
        messages += exchange(name, prompt=[1, 2], completion=tokens, logprobs=(-rng.random(len(tokens))).tolist())
    return table("traces", traces), table("messages", messages)


def in_slices(rows, borders):
    """Return a table by reference, in parts that end at these shares of its rows."""
    cuts = sorted({0, rows.num_rows, *(round(border * rows.num_rows) for border in borders)})
    parts = [rows.slice(a, b - a) for a, b in pairwise(cuts)] or [rows]

    def read(number, columns):
        return parts[number] if columns is None else parts[number].select(list(columns))

    return StoredRows(rows.schema, len(parts), read)


def between_groups(traces, messages, borders):
    """Return shares of the rows of messages where a group ends, as rollouts are committed, one for each border."""
    group_of = dict(zip(traces["trace_id"].to_pylist(), traces["group_id"].to_pylist(), strict=True))
    groups = [group_of[name] for name in messages["trace_id"].to_pylist()]
    ends = [row for row in range(1, len(groups)) if groups[row] != groups[row - 1]]
    return [ends[int(border * (len(ends) - 1))] / len(groups) for border in borders] if ends else []


STEPS = st.lists(st.integers(0, 5), min_size=1, max_size=20)
BORDERS = st.lists(st.floats(0, 1), max_size=6)


@given(groups=STEPS, borders=BORDERS, most=st.sampled_from([1, 500, 1 << 30]), in_order=st.booleans())
def test_each_group_is_in_one_part_with_all_its_messages(groups, borders, most, in_order):
    traces, messages = step(sorted(groups) if in_order else groups)
    parts = list(group_parts(traces, in_slices(messages, borders), most))
    assert pa.concat_tables([own for own, _ in parts]).equals(traces)
    assert pa.concat_tables([of for _, of in parts]).equals(messages)
    names = [set(own["group_id"].to_pylist()) for own, _ in parts]
    assert sum(map(len, names)) == len(set().union(*names))
    for own, of in parts:
        assert set(of["trace_id"].to_pylist()) <= set(own["trace_id"].to_pylist())


def test_groups_that_follow_each_other_are_apart():
    traces, messages = step([0, 0, 1, 1, 2, 2], failing=0)
    assert len(list(group_parts(traces, in_slices(messages, [1 / 3, 2 / 3]), 1))) == 3


ALGORITHMS = (
    {"type": "grpo"},
    {"type": "rae"},
    {"type": "rae", "key": "agent", "order": "pre"},
    {"type": "reinforce_pp"},
    {"type": "reinforce_pp", "statistics": "tokens"},
    {"type": "echo", "user": {"alpha": 0.5}},
)


@settings(max_examples=60)
@given(groups=STEPS, borders=BORDERS, seed=st.integers(0, 9), algorithm=st.sampled_from(ALGORITHMS))
def test_stages_make_the_same_of_parts(groups, borders, seed, algorithm):
    traces, messages = step(sorted(groups), seed)
    whole = {"traces": traces, "messages": messages}
    ends = between_groups(traces, messages, borders)
    parts = {"traces": in_slices(traces, borders), "messages": in_slices(messages, ends)}
    with pytest.MonkeyPatch.context() as patch:
        for section in ("tasks.arrays.group_parts", "tasks.packing.stage"):
            patch.setattr(f"{section}.PART_BYTES", 300)
        patch.setattr("tasks.arrays.group_parts.group_parts.__defaults__", (300, None))
        patch.setattr(packing_stage, "SPOOLED", 16)
        for tables in (whole, parts):
            tables |= written(filtering(tables, view(FILTERING, model={"vocab_size": 300})))
            tables |= written(advantage(tables, view(ADVANTAGE, algorithm=algorithm)))
            tables |= written(packing(tables, view(PACKING, packing={"tokens_per_row": 16, "updates_per_step": 2})))
    for made in ("verdicts", "samples", "batches", *(["estimator_states"] if algorithm["type"] == "rae" else [])):
        assert parts[made].equals(whole[made].combine_chunks()), made

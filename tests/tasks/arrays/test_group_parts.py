"""A step in parts with whole groups: every stage makes of it what it makes of all of it at once."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.arrays.group_parts import group_parts
from tasks.filtering.stage import STAGE as FILTERING
from tasks.packing import stage as packing_stage
from tasks.packing.stage import STAGE as PACKING
from tasks.runtime.stored_rows import rows_of
from tests.fixtures.builders import table, view
from tests.fixtures.parts import between_groups, in_slices, step
from tests.fixtures.stages import advantage, filtering, packing, written

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


FUNCTIONS = "tests.fixtures.masks"
ALGORITHMS = (
    {"type": "grpo"},
    {"type": "rae"},
    {"type": "rae", "key": "agent", "order": "pre"},
    {"type": "reinforce_pp"},
    {"type": "reinforce_pp", "statistics": "tokens"},
    {"type": "echo", "user": {"alpha": 0.5}},
    {
        "type": "echo",
        "user": {"alpha": 0.5},
        "keep_mask": f"{FUNCTIONS}:below",
        "arguments": {"limit": 2},
        "in_parts": True,
    },
    {"type": "echo", "user": {"alpha": 0.5}, "keep_mask": f"{FUNCTIONS}:common"},
    {"type": "custom", "function": f"{FUNCTIONS}:halved", "in_parts": True},
    {"type": "custom", "function": f"{FUNCTIONS}:centred"},
    {"type": "custom", "function": f"{FUNCTIONS}:remembering", "in_parts": True, "keeps_state": True},
    {"type": "opd", "teacher": {"path": "/teacher"}},
)
AT_ONCE = [each for each in ALGORITHMS if ("keep_mask" in each or "function" in each) and "in_parts" not in each]
"""Those of functions of one's own that nobody has said may be called with a part of a batch."""
SHORT = {"type": "custom", "name": "short", "function": f"{FUNCTIONS}:shorter", "in_parts": True, "enforce": True}


def references(messages, seed):
    """Return a teacher's log-prob of each sampled token."""
    rng, rows = np.random.default_rng(seed), messages.filter(messages["sampled"])
    named = zip(rows["trace_id"].to_pylist(), rows["message"].to_pylist(), rows["mask"].to_pylist(), strict=True)
    names = ("trace_id", "message", "logprobs")
    return table("references", [dict(zip(names, (*at, -rng.random(len(mask))), strict=True)) for *at, mask in named])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each["type"])
@settings(max_examples=20)
@given(groups=STEPS, borders=BORDERS, seed=st.integers(0, 9))
@example(groups=[0, 0, 0, 1, 1, 2, 2, 2, 3, 3], borders=[0.3, 0.6, 0.9], seed=3)  # whatever is drawn: in several parts
def test_stages_make_the_same_of_parts(groups, borders, seed, algorithm):
    traces, messages = step(sorted(groups), seed)
    whole = {"traces": traces, "messages": messages}
    ends = between_groups(traces, messages, borders)
    parts = {"traces": in_slices(traces, borders), "messages": in_slices(messages, ends)}
    if algorithm["type"] == "opd":
        whole["references"] = references(messages, seed)
        parts["references"] = in_slices(whole["references"], borders[1:])
    with pytest.MonkeyPatch.context() as patch:
        for section in ("tasks.arrays.group_parts", "tasks.packing.stage"):
            patch.setattr(f"{section}.PART_BYTES", 300)
        patch.setattr("tasks.arrays.group_parts.group_parts.__defaults__", (300, None))
        patch.setattr(packing_stage, "SPOOLED", 16)
        filters = view(FILTERING, model={"vocab_size": 300}, filtering={"filters": [{"type": "errored"}, SHORT]})
        sections = view(ADVANTAGE, algorithm=algorithm)
        for tables, cut in ((whole, lambda rows: rows), (parts, lambda rows: in_slices(rows, borders))):
            tables |= {name: cut(rows) for name, rows in written(filtering(tables, filters)).items()}
            made = advantage(tables, sections)
            tables |= {name: cut(rows) for name, rows in written(made).items()}
            if "estimator_states" in tables:  # the next step goes on from them
                again = written(advantage(tables, sections, step=1))
                tables |= {f"{name} of the next": rows for name, rows in again.items()}
            tables |= written(packing(tables, view(PACKING, packing={"tokens_per_row": 16, "updates_per_step": 2})))
    at_once = parts["messages"].num_parts == 1 or algorithm in AT_ONCE
    assert isinstance(made["samples"], pa.Table) == at_once
    assert parts.keys() == whole.keys()
    for name in parts.keys() - {"traces", "messages", "references"}:
        assert rows_of(parts[name]).table().equals(whole[name].combine_chunks()), name

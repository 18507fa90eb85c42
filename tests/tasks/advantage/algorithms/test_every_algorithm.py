"""Every algorithm answers what is asked of one of a user's own: arrays of the declared kinds, sizes and ranges."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.advantage.algorithms import ALGORITHMS
from tasks.advantage.algorithms.custom import require_credit
from tasks.advantage.stage import STAGE, advantage
from tests.fixtures.builders import exchange, table, trace, view
from tests.fixtures.stages import tables_of

TEACHER = {"teacher": {"path": "/teacher"}}
SECTIONS = {"opd": TEACHER, "sft": TEACHER, "echo": {"user": {"alpha": 0.5}}}
ALONE = [trace("a"), trace("b", reward=0.0), trace("c", reward=None)]
SEATS = [row | {"agent": agent, "group_id": agent} for row, agent in zip(ALONE, ("one", "two", "two"), strict=True)]


def given(traces):
    """What the stage reads: an exchange for each trace, all of it scored by a reference."""
    messages = [row for one in traces for row in exchange(one["trace_id"])]
    scored = [{"trace_id": one["trace_id"], "message": 1, "logprobs": [-0.5, -2.0]} for one in traces]
    return tables_of(traces, messages) | {"references": table("references", scored)}


@pytest.mark.parametrize("kind", sorted(set(ALGORITHMS) - {"custom"}))
def test_its_credit_is_one_that_training_can_be_held_to(kind, monkeypatch):
    algorithm, seen = ALGORITHMS[kind], []

    def watched(kept, settings):
        seen.append((kept, algorithm.credit(kept, settings)))
        return seen[-1][1]

    monkeypatch.setitem(ALGORITHMS, kind, replace(algorithm, credit=watched))
    config = view(STAGE, algorithm={"type": kind} | SECTIONS.get(kind, {}))
    advantage(given(SEATS if kind in ("rae", "hierarchical_grpo") else ALONE), config)
    ((kept, credit),) = seen
    require_credit(kept, replace(credit, states=None))
    assert credit.signals(kept).dtype == np.float32

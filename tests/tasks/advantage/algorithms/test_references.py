"""What the reference-KL signal and the teacher's tokens are worth: figures by hand, a loop per token, and refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.advantage.stage import STAGE, ImportedWithoutTokens
from tests.fixtures.builders import exchange, exchanges, message, table, trace, view
from tests.fixtures.stages import advantage, tables_of

OPD = {"type": "opd", "teacher": {"path": "/teacher"}}
SFT = {"type": "sft", "teacher": {"path": "/teacher"}}


def scored(trace_id, number, logprobs):
    return {"trace_id": trace_id, "message": number, "logprobs": logprobs}


def credited(algorithm, messages, references=None, **of_trace):
    """Return the credits of the traces that some messages are of."""
    names = dict.fromkeys(each["trace_id"] for each in messages)
    tables = tables_of([trace(name, **of_trace) for name in names], messages)
    if references is not None:
        tables["references"] = table("references", references)
    return advantage(tables, view(STAGE, algorithm=algorithm))["samples"].to_pylist()


@pytest.mark.parametrize("algorithm", [OPD, {"type": "opsd"}], ids=["opd", "opsd"])
def test_the_signal_is_the_difference_of_log_probs_on_sampled_tokens_whatever_the_reward(algorithm):
    completion = exchange("t0", (1, 2, 3), (4, 5), logprobs=[-1.0, -0.25])
    for reward in (0.0, 7.0, None):
        (row,) = credited(algorithm, completion, [scored("t0", 1, [-0.5, -2.0])], reward=reward)
        assert row["advantages"] == [0, 0, 0, 0.5, -1.75]
        assert row["ref_kl_weights"] == [0, 0, 0, 1, 1]
        assert row["rl_weights"] == row["ce_weights"] == [0] * 5
        assert row["advantage"] is None and row["baseline"] is None


def test_a_reference_that_is_certain_is_no_reference_that_is_missing():
    (row,) = credited(OPD, exchange("t0", (1,), (4, 5)), [scored("t0", 1, [0.0, 0.0])])
    assert row["advantages"] == [0, 1, 1]


def test_each_environment_is_drawn_to_its_own_rows():
    traces = [trace("t0", environment="x"), trace("t1", environment="y"), trace("t2", environment="x")]
    tables = tables_of(traces, exchanges(traces, prompt=(1,)))
    tables["references"] = table("references", [scored(f"t{n}", 1, [-n, -2.0 * n]) for n in range(3)])
    rows = advantage(tables, view(STAGE, algorithm=OPD))["samples"].to_pylist()
    assert [row["advantages"] for row in rows] == [[0, 1 - n, 1 - 2 * n] for n in range(3)]


def test_what_no_policy_sampled_is_refused():
    with pytest.raises(ImportedWithoutTokens, match="a frozen teacher sampled them"):
        credited(OPD, exchange("t0"), [scored("t0", 1, [-1.0, -1.0])], policy_key="")


def test_the_teachers_tokens_are_imitated_whatever_they_earned():
    rows = credited(SFT, [*exchange("t0"), *exchange("t1")], policy_key="", reward=-1.0)
    for row in rows:
        assert row["ce_weights"] == [0, 0, 0, 1, 1] and row["advantages"] == [0] * 5
        assert row["rl_weights"] == row["ref_kl_weights"] == [0] * 5 and row["advantage"] is None


def tokens(values):
    """Return columns of a message with these tokens: whether sampled, the engine's log-prob, the reference's."""
    mask = [each[0] for each in values]
    engine = [each[1] if each[0] else 0.0 for each in values]
    return {"tokens": range(len(values)), "mask": mask, "logprobs": engine}


LOGPROB = st.floats(-20, 0, width=32)
NODE = st.lists(st.tuples(st.booleans(), LOGPROB, LOGPROB), max_size=5)
GRAPH = st.lists(st.tuples(NODE, st.integers(0, 5)), min_size=1, max_size=6)


@given(st.lists(GRAPH, min_size=1, max_size=3))
def test_a_loop_over_tokens_says_the_same_of_any_graphs(graphs):
    messages, references = [], []
    for number, graph in enumerate(graphs):
        for node, (values, above) in enumerate(graph):
            parent = above % node if node and above else None
            columns = tokens(values)
            messages.append(message(f"t{number}", node, parent=parent, **columns) | {"sampled": any(columns["mask"])})
            if any(columns["mask"]):
                scores = [each[2] if each[0] else 0.0 for each in values]
                references.append(scored(f"t{number}", node, scores))
    rows = credited(OPD, messages, references)
    seen = set()
    for row in rows:
        signal, weights = [], []
        for node in row["path"]:
            for is_sampled, engine, reference in graphs[int(row["trace_id"][1:])][node][0]:
                trained = is_sampled and (row["trace_id"], node) not in seen
                weights.append(float(trained))
                signal.append(float(np.float32(reference) - np.float32(engine)) if trained else 0.0)
            seen.add((row["trace_id"], node))
        assert row["ref_kl_weights"] == weights
        assert row["advantages"] == signal

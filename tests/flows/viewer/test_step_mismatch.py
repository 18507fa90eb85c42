"""Which rollouts of a step the engine and the learner disagree about most: the one column made of values by token."""

import math

import pytest

from flows.queries.rollouts import MISMATCH, MISMATCH_TITLE, lineages_of, with_mismatch
from tests.fixtures.builders import message, trace
from tests.fixtures.step_traces import traces
from tests.flows.viewer.hand_made import FORKED, PATHS, RUN, HandMade, batch, credit, forked, update
from tests.flows.viewer.looking import pluck, values

FIRST = credit(FORKED, 0, PATHS[0], {"rl_weights": [0, 0, 0, 0, 1, 1, 0, 0, 0], "ce_weights": [0] * 8 + [2]})
SECOND = credit(FORKED, 1, PATHS[1], {"rl_weights": [0, 0, 0, 0.25, 0.25]})
NEAR, OUTSIDE = (credit(name, 0, [0], {"rl_weights": [0, 1]}) for name in ("near", "outside"))
ROWS = [
    batch([NEAR, FIRST], 0, logprobs=[0, -1, *(0, 0, 0, 0, -1, -2, 0, 0, -1)]),
    batch([SECOND, OUTSIDE], 1, logprobs=[*(0, 0, 0, -0.5, -0.5), 0, -1]),
    batch([], 2),
]
LEARNER = {
    f"{FORKED}/0": [0, 0, 0, 0, -1.5, -2, 0, 0, -9],
    f"{FORKED}/1": [0, 0, 0, -0.5, -1],
    "near/0": [0, -1.25],
    "outside/0": [0, -4],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = HandMade(tmp_path_factory.mktemp("mismatch") / "store")
    traces = [trace(FORKED), trace("near"), trace("outside", policy_key=""), trace("unused")]
    messages = [*forked(), *(message(name, 0) for name in ("near", "outside", "unused"))]
    learnt = [
        {"sample_id": name, "logprobs": values, "entropies": [0] * len(values)} for name, values in LEARNER.items()
    ]
    made.step(
        traces, messages, [FIRST, SECOND, NEAR, OUTSIDE], batches=ROWS, updates=[update(mismatch_kl=0.5)],
        token_statistics=learnt,
    )  # fmt: skip
    return made.reader


def k3(log_ratio):
    return math.exp(log_ratio) - 1 - log_ratio


@pytest.mark.parametrize("name", [MISMATCH, MISMATCH_TITLE])
def test_it_is_the_mean_over_all_tokens_of_a_trace_with_rl_weight(library, name):
    rows = traces(library, RUN, 0)
    found = with_mismatch(library, RUN, lineages_of(library, RUN, 0), rows, ["reward", name])
    assert dict(zip(found["trace_id"], found[MISMATCH], strict=True)) == {
        FORKED: pytest.approx(2 * k3(-0.5) / 4),  # two of the four tokens of both samples are half a nat apart
        "near": pytest.approx(k3(-0.25)),
        "outside": None,  # no policy of ours sampled it
        "unused": None,
    }
    assert found["trace_id"].equals(rows["trace_id"])


def test_it_is_read_only_where_it_is_asked_for(library):
    found = with_mismatch(library, RUN, lineages_of(library, RUN, 0), traces(library, RUN, 0), ["reward"])
    assert found[MISMATCH].null_count() == 4


def test_the_page_of_a_step_sorts_by_it_and_shows_it(library):
    page = values(library, f"/runs/{RUN}/steps/0", sort=MISMATCH, order="desc")["traces"]
    assert pluck(page["rows"], "trace_id") == [FORKED, "near", "outside", "unused"]
    assert pluck(page["columns"], "name")[:2] == ["trace_id", MISMATCH]

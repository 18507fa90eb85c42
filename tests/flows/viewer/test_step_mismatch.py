"""Which rollouts of a step the engine and the learner disagree about most: the one column made of values by token."""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flows.queries.rollouts import MISMATCH, MISMATCH_TITLE, lineages_of, traces, with_mismatch
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tests.fixtures.builders import message, trace
from tests.flows.viewer.hand_made import FORKED, PATHS, RUN, HandMade, batch, credit, forked, update
from tests.flows.viewer.looking import values

FIRST: dict[str, list[float]] = {"rl_weights": [0, 0, 0, 0, 1, 1, 0, 0, 0], "ce_weights": [0, 0, 0, 0, 0, 0, 0, 0, 2]}
SECOND: dict[str, list[float]] = {"rl_weights": [0, 0, 0, 0.25, 0.25]}
NEAR: dict[str, list[float]] = {"rl_weights": [0, 1]}
LEARNER: dict[str, list[float]] = {
    f"{FORKED}/0": [0, 0, 0, 0, -1.5, -2, 0, 0, -9],
    f"{FORKED}/1": [0, 0, 0, -0.5, -1],
    "near/0": [0, -1.25],
    "outside/0": [0, -4],
}


def packed(
    names: list[str], weights: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], row: int
) -> dict[str, Any]:
    """A row of batches that holds samples with their engine's log-probs."""
    borders = [0]
    for each in engine:
        borders.append(borders[-1] + len(each))
    zeros = [0.0] * borders[-1]
    streams = {name: zeros for name in ("temperatures", "advantages", "ce_weights", "ref_kl_weights")}
    own = {"rl_weights": [*chain(*weights)], "logprobs": [*chain(*engine)]}
    return batch(names, row) | {"cu_seqlens": borders, "token_ids": [1] * borders[-1], **streams, **own}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root: Path = tmp_path_factory.mktemp("mismatch") / "store"
    made = [trace(FORKED), trace("near"), trace("outside", policy_key=""), trace("unused")]
    said = [*forked(), *(message(name, 0) for name in ("near", "outside", "unused"))]
    names = ("near/0", f"{FORKED}/0")
    rows = [
        packed(list(names), [[0, 1], FIRST["rl_weights"]], [[0, -1], [0, 0, 0, 0, -1, -2, 0, 0, -1]], 0),
        packed([f"{FORKED}/1", "outside/0"], [SECOND["rl_weights"], [0, 1]], [[0, 0, 0, -0.5, -0.5], [0, -1]], 1),
        packed([], [], [], 2),
    ]
    credits = [
        credit(FORKED, 0, PATHS[0], FIRST),
        credit(FORKED, 1, PATHS[1], SECOND),
        credit("near", 0, [0], NEAR),
        credit("outside", 0, [0], NEAR),
    ]
    learnt = [
        {"sample_id": name, "logprobs": values, "entropies": [0] * len(values)} for name, values in LEARNER.items()
    ]
    HandMade(root).step(made, said, credits, batches=rows, updates=[update(mismatch_kl=0.5)], token_statistics=learnt)
    return StoreReader.at(root)


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


@pytest.mark.parametrize("name", [MISMATCH, MISMATCH_TITLE])
def test_it_is_the_mean_over_all_tokens_of_a_trace_with_rl_weight(library, name):
    lineages = lineages_of(library, RUN, 0)
    found = with_mismatch(library, RUN, lineages, traces(library, RUN, 0), ["reward", name])
    told = dict(zip(found["trace_id"], found[MISMATCH], strict=True))
    assert told == {
        FORKED: pytest.approx(2 * k3(-0.5) / 4),  # two of the four tokens of both samples are half a nat apart
        "near": pytest.approx(k3(-0.25)),
        "outside": None,  # no policy of ours sampled it
        "unused": None,
    }
    assert found["trace_id"].to_list() == traces(library, RUN, 0)["trace_id"].to_list()


def test_it_is_read_only_where_it_is_asked_for(library):
    lineages = lineages_of(library, RUN, 0)
    found = with_mismatch(library, RUN, lineages, traces(library, RUN, 0), ["reward"])
    assert found[MISMATCH].null_count() == 4


def test_the_page_of_a_step_sorts_by_it_and_shows_it(library):
    traces = values(library, addresses.step(RUN, 0), sort=MISMATCH, order="desc")["traces"]
    assert [row["trace_id"] for row in traces["rows"]] == [FORKED, "near", "outside", "unused"]
    assert [column["name"] for column in traces["columns"]][:2] == ["trace_id", MISMATCH]

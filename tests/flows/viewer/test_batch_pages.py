"""The pages of a batch and of a row: what they say as values and as HTML, and that each leads to the others."""

import re
from typing import Any

import pytest

from flows.queries.store_reader import StoreReader
from flows.reporting.svg import diverging, sequential
from flows.viewer import addresses
from flows.viewer.pages import batch as row_page
from flows.viewer.pages.batch import trace_of
from flows.viewer.svg.rollouts import packed_row
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import answer, values


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    root = tmp_path_factory.mktemp("pages") / "store"
    rehearse(root, "run", steps=2, packing={"tokens_per_row": 64, "data_parallel": 8})
    return StoreReader.at(root)


BATCH, ROW = addresses.batch("run", 0), addresses.row("run", 0, 0)


def test_a_batch_says_what_was_measured_and_which_policy_came_of_it(library: StoreReader) -> None:
    said = values(library, addresses.batch("run", 1))
    assert (said["state"], said["policy"]["made"], said["policy"]["from"]) == ("trained", "run:2", "run:1")
    assert (said["previous"], said["next"], said["num_samples"]) == (0, None, 12)
    (update,) = said["updates"]
    assert update["measured"]["loss"] == 0.1, "what the learner that is played says of step 1"
    assert update["rl_tokens"] > 0 and update["ce_tokens"] == 0
    assert said["num_padding"] == sum(not row["samples"] for row in said["rows"])
    assert said["largest"] == max(abs(sample["advantage"]) for row in said["rows"] for sample in row["samples"])


def test_a_row_tells_every_token_and_leaves_what_was_not_measured_open(library: StoreReader) -> None:
    said = values(library, ROW)
    tokens = [token for piece in said["drawn"]["samples"] for token in piece["tokens"]]
    assert len(tokens) == said["row"]["num_tokens"] == sum(sample["num_tokens"] for sample in said["samples"])
    assert said["drawn"]["after"] is None
    weighted = [token for token in tokens if token["rl_weights"]]
    assert len(weighted) == sum(sample["num_weighted"] for sample in said["samples"]) > 0
    assert all(token["advantage"] is not None and token["levels"]["com"] == "rl" for token in weighted)
    rest = [token for token in tokens if not token["rl_weights"]]
    assert rest and all(token["advantage"] is None and token["logprob"] is None for token in rest)
    assert all(token["text"] == f"⟨{token['token_id']}⟩" for token in tokens), "the run has no tokenizer"


@pytest.mark.parametrize(("rl_weight", "logprob"), [(0.5, 0.0), (0.0, None)])
def test_a_token_that_was_certain_is_not_one_that_was_not_sampled(rl_weight: float, logprob: float | None) -> None:
    weights = {"rl_weights": rl_weight, "ce_weights": 0.0, "ref_kl_weights": 0.0}
    token = row_page._token({"token_id": 1, "logprob": 0.0, "advantage": 0.5, **weights}, ("a", False), 1.0)
    assert token["logprob"] == logprob and token["advantage"] == (0.5 if rl_weight else None)


def test_long_rows_are_drawn_in_parts_that_join(library: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.viewer.pages.batch.MOST_TOKENS", 20)
    narrow = StoreReader.at(library.store.root.address)
    row = next(row["row"] for row in values(narrow, BATCH)["rows"] if len(row["samples"]) > 1)
    seen, first = [], 0
    while first is not None:
        drawn = values(narrow, addresses.row("run", 0, row), first=str(first))["drawn"]
        seen += [piece["place"] for piece in drawn["samples"]]
        assert sum(len(piece["tokens"]) for piece in drawn["samples"]) <= 20
        first = drawn["after"]
    assert seen == list(range(len(seen))) and len(seen) > 1


def test_of_a_sample_without_end_the_beginning_is_drawn_and_the_rest_counted(
    library: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.viewer.pages.batch.MOST_TOKENS", 4)
    said = values(library, ROW)
    (piece,) = said["drawn"]["samples"]
    assert len(piece["tokens"]) == 4 and piece["left_out"] == said["samples"][0]["num_tokens"] - 4 > 0
    assert f"{piece['left_out']} more tokens" in answer(library, ROW)[1]


@pytest.mark.parametrize(
    ("address", "status"),
    [
        (addresses.batch("run", 9), 404), (addresses.row("run", 0, 99), 404), (f"{BATCH}?colour=taste", 400),
        (f"{BATCH}?page=7", 400), (f"{ROW}?first=99", 400),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_says_so(library: StoreReader, address: str, status: int) -> None:
    assert answer(library, address)[0] == status


def test_steps_of_colour_keep_signs_zeros_and_nothing_apart() -> None:
    assert [diverging(value, 2.0) for value in (-2.0, -0.001, 0.0, None, 0.5, 0.51, 9.0)] == [
        "n4", "n1", "0", "none", "p1", "p2", "p4",
    ]  # fmt: skip
    shades = [sequential(value, 0.0, 1.0) for value in (None, 0.0, 0.49, 0.5, 1.0, 7.0)]
    assert shades == ["none", "0", "1", "2", "4", "4"]
    assert sequential(1.0, 1.0, 1.0) == "4"


def test_a_bar_escapes_what_environments_named() -> None:
    hostile = '"><script>alert(1)</script>\u202e'
    sample: dict[str, Any] = {"place": 0, "start": 0, "num_tokens": 3}
    sample |= dict.fromkeys(("advantage", "reward", "baseline"))
    sample |= {"sample_id": f"{hostile}/0", "trace_id": hostile, "environment": hostile, "example_id": hostile}
    sample |= {"of_environment": 0, "address": addresses.trace("run", hostile)}
    drawn = packed_row({"row": 0, "num_samples": 1, "num_tokens": 3, "samples": [sample]}, 6, None, (None, None))
    assert "<script" not in drawn and "\u202e" not in drawn
    assert not re.search(r'=""[^>]*>', drawn), "no attribute was ended early"
    assert 'width="50.0000%"' in drawn and "adv-none" in drawn


def test_a_sample_leads_to_its_branch_of_the_trace() -> None:
    sample = {"trace_id": "t", "key": "k", "branch": 2}
    assert trace_of("run", sample) == "/runs/run/traces/t?key=k&branch=2"
    assert trace_of("run", sample | {"branch": 0}) == "/runs/run/traces/t?key=k"
    assert trace_of("run", sample | {"trace_id": None}) is None

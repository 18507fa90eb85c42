"""An example over a run's history: which attempts are found, how they are counted, and what the page makes of them."""

import json
from typing import Any

import polars as pl
import pytest

from configs.evaluation import EvaluationConfig, EvaluationSet
from flows.queries.request import NotThere
from flows.queries.rollouts import attempts, by_step, example
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tests.fixtures import builders
from tests.flows.viewer import looking
from tests.flows.viewer.hand_made import RUN, HandMade, batch, credit, update

ENVIRONMENT = "reverse"
TASK = json.dumps({"prompt": "Turn it round", "answer": 7})


def traces(step: int, rewards: list[float | None], **others: Any) -> list[dict[str, Any]]:
    """Attempts at the example `wanted`, and one at another with a reward of its own."""
    rows = [
        builders.trace(
            f"{step}{place}".ljust(32, "0"), reward=reward, example_id="wanted", policy_version=step, **others
        )
        for place, reward in enumerate(rewards)
    ]
    return [*rows, builders.trace(f"{step}x".ljust(32, "0"), reward=100.0, example_id="other")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """A run that tried an example at two steps, trained on one attempt, and met it in an evaluation of policy 2."""
    hand = HandMade(tmp_path_factory.mktemp("examples") / "store")
    listed = {"environment": ENVIRONMENT, "split": "train", "task": TASK}
    hand.work("examples", {"examples": [listed | {"example_id": name} for name in ("wanted", "other", "untried")]})
    sample = credit("00".ljust(32, "0"), 0, (0,), {"rl_weights": [0.0, 1.0], "advantages": [0.0, 0.5]})
    hand.step(traces(0, [1.0, 0.5, None]), [], [sample], batches=[batch([sample["sample_id"]])], updates=[update()])
    hand.step(traces(1, [1.5]), [], step=1)
    hand.work("rollout", {"traces": traces(2, [0.0, 1.0], agent="solver")}, 2, evaluation_assignment="a" * 32)
    return StoreReader.at(hand.store.root.address)


def test_attempts_are_those_at_the_example_alone_and_each_step_is_counted(library: StoreReader) -> None:
    found = attempts(library, RUN, ENVIRONMENT, "wanted")
    assert found.select("step", "for_training", "agent", "reward", "outcome").rows() == [
        (0, True, "agent", 1.0, "trained"),
        (0, True, "agent", 0.5, "no weight"),
        (0, True, "agent", None, "no weight"),
        (1, True, "agent", 1.5, "pending"),
        (2, False, "solver", 0.0, "evaluated"),
        (2, False, "solver", 1.0, "evaluated"),
    ]
    assert found["advantage"].to_list() == [0.5, *[None] * 5]
    assert found["passed"].to_list() == [True, False, None, True, False, True]
    assert found["set"].to_list() == [None] * 4 + [""] * 2
    steps = by_step(attempts(library, RUN, ENVIRONMENT, "wanted"))
    told = steps.select("step", "num_attempts", "num_scored", "reward", "lowest", "highest", "num_passed", "pass_rate")
    assert told.rows() == [
        (0, 3, 2, 0.75, 0.5, 1.0, 1, 0.5),
        (1, 1, 1, 1.5, 1.5, 1.5, 1, 1.0),
        (2, 2, 2, 0.5, 0.0, 1.0, 1, 0.5),
    ]
    nobody = attempts(library, RUN, ENVIRONMENT, "wanted").filter(pl.col("reward").is_null())
    assert by_step(nobody).select("reward", "pass_rate").rows() == [(None, None)]


def test_what_passes_is_the_run_s_choice_or_the_set_s(library: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    own = EvaluationSet.model_construct(name="", pass_reward=2.0)  # the set of what was tried by hand
    config = library.config(RUN).model_copy(update={"evaluation": EvaluationConfig(pass_reward=0.5, sets=(own,))})
    monkeypatch.setattr(StoreReader, "config", lambda self, run: config)
    found = attempts(library, RUN, ENVIRONMENT, "wanted")
    assert found["passed"].to_list() == [True, True, None, True, False, False]
    said = looking.values(library, addresses.example(RUN, ENVIRONMENT, "wanted"))
    assert (said["pass_reward"], said["overall"]["training"]["num_passed"]) == (0.5, 3)
    assert [each["num_passed"] for each in said["by_step"]] == [2, 1, 0]


def test_an_example_that_was_listed_and_never_tried_has_no_attempts(library: StoreReader) -> None:
    assert example(library, RUN, ENVIRONMENT, "untried") == {"split": "train", "task": TASK}
    assert attempts(library, RUN, ENVIRONMENT, "untried").is_empty()
    status, text = answer(library, id="untried")
    assert status == 200 and "has not tried this example" in text
    with pytest.raises(NotThere, match="nearest that it tried are reverse/wanted"):
        attempts(library, RUN, ENVIRONMENT, "wantd")


def answer(library: StoreReader, **query: str) -> tuple[int, str]:
    return looking.answer(library, addresses.example(RUN, ENVIRONMENT, ""), **query)


def test_the_page_leads_to_every_attempt_and_to_the_steps(library: StoreReader) -> None:
    said = looking.values(library, addresses.example(RUN, ENVIRONMENT, "wanted"))
    counts = {"num_attempts": 4, "num_scored": 3, "num_failed": 0, "num_passed": 2}
    assert said["prompt"] == "Turn it round" and said["overall"]["training"] == {
        **{**counts, "reward": 1.0},
        "pass_rate": 2 / 3,
    }
    for each in said["attempts"]:
        assert each["address"] == addresses.trace(RUN, each["trace_id"], each["key"])
    steps = [addresses.step(RUN, 0), addresses.step(RUN, 1), addresses.evaluation(RUN, 2)]
    assert [each["address"] for each in said["by_step"]] == steps
    rates = {each["title"]: {one["name"]: one["values"] for one in each["series"]} for each in said["charts"]}
    assert rates["Pass rate"] == {"training": [0.5, 1.0, None], "evaluations": [None, None, 0.5]}
    assert rates["Mean reward"]["training"] == [0.75, 1.5, None]


def test_the_page_shows_one_agent_where_it_is_asked_for(library: StoreReader) -> None:
    said = json.loads(answer(library, id="wanted", agent="solver", format="json")[1])
    assert (said["num_attempts"], said["overall"]["training"]["num_attempts"]) == (2, 0)
    assert answer(library, id="wanted", agent="nobody")[0] == 400
    assert answer(library, id="wanted", read="9")[0] == 200, "the last page"

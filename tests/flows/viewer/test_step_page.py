"""The pages of a step and of an evaluation: what they say as values and as HTML, and where they lead."""

import json
from typing import Any

import pytest

from flows.queries.rollouts import evaluation_traces, steps_of, traces
from flows.queries.scores import scored_evaluations
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from storage.store import Store, open_store
from tests.fixtures import evaluations
from tests.fixtures.builders import message, trace
from tests.flows.viewer import looking
from tests.flows.viewer.hand_made import RUN, HandMade
from tests.flows.viewer.looking import Elements
from tests.flows.viewer.stepped import PARTLY, begun


def values(library: StoreReader, run: str, number: int | str, **query: str) -> dict[str, Any]:
    """The page as JSON, with how it was answered."""
    status, text = looking.answer(library, f"/runs/{run}/steps/{number}", **query, format="json")
    return {**json.loads(text), "status": status}


def html(library: StoreReader, run: str, number: int | str, **query: str) -> Elements:
    status, text = looking.answer(library, f"/runs/{run}/steps/{number}", **query)
    assert status == 200, text
    return Elements(text)


def test_the_values_are_those_of_the_frames(forked):
    found = values(forked, "base", 0)
    frame = traces(forked, "base", 0)
    assert found["figures"]["num_traces"] == frame.height == found["traces"]["num_chosen"] == 12
    assert [row["trace_id"] for row in found["traces"]["rows"]] == frame["trace_id"].to_list()
    assert [row["advantage"] for row in found["traces"]["rows"]] == frame["advantage"].to_list()
    assert (found["previous"], found["next"], found["packed"]) == (None, 1, True)
    chosen = {"sort": "reward", "order": "desc", "size": "5"}
    assert values(forked, "base", 0, **chosen)["carried"] == chosen, "it goes along to the steps beside"
    assert found["policies"]["after"]["name"] == "base:1" and len(found["updates"]) == 1
    assert [row["group_id"] for row in found["groups"]["rows"]] == ["0-0", "0-1", "0-2"]
    cells = [cell for row in found["groups"]["rows"] for cell in row["cells"]]
    assert sorted(cell["trace_id"] for cell in cells) == sorted(frame["trace_id"])
    assert {cell["outcome"] for cell in cells} == {"trained"} and all(0 <= cell["level"] <= 10 for cell in cells)
    assert sum(map(sum, (each["counts"] for each in found["histogram"]))) == 12


def test_a_forks_rows_are_told_as_computed_by_the_other(forked):
    found = values(forked, "fork", 1)
    assert found["computed_by"] == ["base"]
    assert found["policies"]["after"] is None and {row["outcome"] for row in found["traces"]["rows"]} == {"pending"}
    same = traces(forked, "base", 1)["trace_id"].to_list()
    assert [row["trace_id"] for row in found["traces"]["rows"]] == same


def test_a_step_of_which_parts_are_done(tmp_path):
    library = begun(tmp_path / "store", 1)
    found = values(library, RUN, 0)
    assert (found["finished"], found["num_batches"], found["figures"]["num_traces"]) == (False, 1, 2)
    assert {row["outcome"] for row in found["traces"]["rows"]} == {"pending"}
    assert found["figures"]["reward"]["mean"] is None and found["figures"]["num_kept"] is None
    assert found["histogram"] == [] and found["policies"]["after"] is None
    assert "Some rollouts are not finished yet" in "".join(html(library, RUN, 0).texts)
    begun(tmp_path / "store", 3)
    assert values(library, RUN, 0)["figures"]["num_traces"] == 6, "what was held is not what is there now"
    rows = values(library, RUN, 0)["traces"]["rows"]
    assert {row["key"] for row in rows} == {PARTLY}
    assert [row["trace_id"] for row in rows] == ["p0-0", "p0-1", "p1-0", "p1-1", "p2-0", "p2-1"]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run that evaluates two sets after each step, with an error that a second round makes up for."""
    root = tmp_path_factory.mktemp("scored") / "store"
    sets = [{"name": "easy", "where": {"tier": [0]}}, {"name": "hard", "where": {"tier": [1, 2]}}]
    evaluation = {"every": 1, "num_examples": 2, "attempts": 2, "retry_errors": 1, "sets": sets}
    sampler = evaluations.Sampler(frozenset({"eval-reverse_text-0/0"}))
    evaluations.train(root, "base", sampler, evaluation=evaluation)
    yield StoreReader(open_store(root))


def evaluated(library: StoreReader, version: int, **query: str) -> dict[str, Any]:
    return looking.values(library, addresses.evaluation("base", version), **query)


def test_an_evaluation_and_its_sets(scored):
    every = evaluated(scored, 1)
    assert every["evaluation"]["sets"] == ["easy", "hard"] and every["evaluation"]["set"] is None
    assert every["evaluation"]["num_replaced"] == 2
    assert every["traces"]["num_all"] == 10  # two sets of four attempts, and one of each made again
    for name in ("easy", "hard"):
        page = evaluated(scored, 1, set=name)
        (score,) = page["evaluation"]["scores"]
        rows = evaluation_traces(scored, "base", 1, name).to_dicts()
        assert [row["trace_id"] for row in page["traces"]["rows"]] == [row["trace_id"] for row in rows]
        assert len(rows) == 5 and {row["set"] for row in rows} == {name} == {score["set"]}
        assert {row["outcome"] for row in rows} == {"evaluated"}
        again = [(row["round"], row["replaced"]) for row in rows if row["assignment_id"] == "eval-reverse_text-0/0"]
        assert sorted(again) == [(0, True), (1, False)]
        assert {row["replaced"] for row in rows if row["assignment_id"] != "eval-reverse_text-0/0"} == {False}
        first, second = ([row["reward"] for row in rows if row["group_id"] == f"eval-reverse_text-{n}"] for n in (0, 1))
        (alone,) = [each for each in first if each is not None]
        assert score["average"] == pytest.approx((alone + sum(second) / 2) / 2) and score["errors"] == {
            "infrastructure": 1
        }
    assert [each["set"] for each in every["evaluation"]["scores"]] == ["easy", "hard"]


def test_evaluations_lead_to_each_other(scored):
    versions = steps_of(scored, "base", for_training=False)
    assert len(versions) > 1
    for at, version in enumerate(versions):
        found = evaluated(scored, version)
        assert found["previous"] == (versions[at - 1] if at else None) and found["packed"] is False
    for address, status in (("1?set=middling", 400), ("7", 404)):
        assert looking.answer(scored, f"/runs/base/evaluations/{address}")[0] == status


def test_all_evaluations_are_read_in_one_look(scored, monkeypatch):
    before, looks, read = scored_evaluations(scored, "base"), list[Any](), scored.store.read

    def look(_: Store, *question: Any) -> Any:
        looks.append(question)
        return read(*question)

    monkeypatch.setattr(Store, "read", look)
    again = scored_evaluations(StoreReader(scored.store), "base")
    assert [scores.described for _, scores in again] == [scores.described for _, scores in before]
    assert len(looks) == 1 and len(again) > 2


def test_of_a_large_group_some_rollouts_are_drawn(tmp_path):
    made = HandMade(tmp_path)
    made.step([trace(f"t{number}") for number in range(70)], [message(f"t{number}", 0) for number in range(70)])
    library = StoreReader.at(tmp_path)
    (row,) = values(library, RUN, 0)["groups"]["rows"]
    assert (len(row["cells"]), row["num_more"], row["num_traces"]) == (64, 6, 70)
    assert "+6" in "".join(html(library, RUN, 0).texts)

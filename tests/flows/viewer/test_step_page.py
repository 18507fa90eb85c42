"""The pages of a step and of an evaluation: what they say as values and as HTML, and where they lead."""

import pytest

from flows.queries.rollouts import evaluation_traces
from flows.queries.store_reader import StoreReader
from storage.store import open_store
from tests.fixtures import evaluations
from tests.fixtures.step_traces import traces
from tests.flows.viewer.hand_made import PARTLY, RUN
from tests.flows.viewer.looking import Elements, answer, pluck, values
from tests.flows.viewer.stepped import begun

STEP = f"/runs/{RUN}/steps/0"


def text(library):
    status, html = answer(library, STEP)
    assert status == 200, html
    return "".join(Elements(html).texts)


def test_the_values_are_those_of_the_frames(forked):
    found = values(forked, "/runs/base/steps/0")
    frame = traces(forked, "base", 0)
    assert found["figures"]["rollouts"]["num_traces"] == frame.height == found["traces"]["num_chosen"] == 12
    names = ("trace_id", "advantage")
    assert pluck(found["traces"]["rows"], *names) == frame.select(names).rows()
    assert (found["previous"], found["next"], found["packed"]) == (None, 1, True)
    chosen = {"sort": "reward", "order": "desc", "size": "5"}
    assert values(forked, "/runs/base/steps/0", **chosen)["carried"] == chosen, "it goes along to the steps beside"
    assert found["new_policy"] == 1 and len(found["updates"]) == 1
    assert pluck(found["groups"], "group_id", "num_traces") == [("0-0", 4), ("0-1", 4), ("0-2", 4)]


def test_a_step_of_which_parts_are_done(tmp_path):
    library = begun(tmp_path / "store", 1)
    found = values(library, STEP)
    assert (found["finished"], found["num_batches"], found["figures"]["rollouts"]["num_traces"]) == (False, 1, 2)
    assert {row["outcome"] for row in found["traces"]["rows"]} == {"pending"}
    assert found["figures"]["rewards"][0]["mean"] is found["figures"]["rollouts"]["num_kept"] is None
    assert found["new_policy"] is None
    assert "Some rollouts are not finished yet" in text(library)
    begun(tmp_path / "store", 3)
    assert values(library, STEP)["figures"]["rollouts"]["num_traces"] == 6, "what was held is not what is there now"
    rows = pluck(values(library, STEP)["traces"]["rows"], "trace_id", "key")
    assert rows == [(name, PARTLY) for name in ("p0-0", "p0-1", "p1-0", "p1-1", "p2-0", "p2-1")]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run that evaluates two sets after each step, with an error that a second round makes up for."""
    root = tmp_path_factory.mktemp("scored") / "store"
    sets = [{"name": "easy", "where": {"tier": [0]}}, {"name": "hard", "where": {"tier": [1, 2]}}]
    evaluation = {"every": 1, "num_examples": 2, "attempts": 2, "retry_errors": 1, "sets": sets}
    sampler = evaluations.Sampler(frozenset({"eval-reverse_text-0/0"}))
    evaluations.train(root, "base", sampler, evaluation=evaluation)
    yield StoreReader(open_store(root))


def evaluated(library, version, **query):
    return values(library, f"/runs/base/evaluations/{version}", **query)


def test_an_evaluation_and_its_sets(scored):
    every = evaluated(scored, 1)
    assert every["evaluation"]["num_replaced"] == 2 and pluck(every["evaluation"]["scores"], "set") == ["easy", "hard"]
    assert every["traces"]["num_all"] == 10  # two sets of four attempts, and one of each made again
    for name, examples, average in (("easy", {"held-0", "held-3"}, 0.2225), ("hard", {"held-1", "held-5"}, 0.2375)):
        page = evaluated(scored, 1, set=name)
        (score,) = page["evaluation"]["scores"]
        rows = evaluation_traces(scored, "base", 1, name)
        assert pluck(page["traces"]["rows"], "trace_id") == rows["trace_id"].to_list()
        assert {*rows["example_id"]} == examples and rows.select("set", "outcome").rows() == [(name, "evaluated")] * 5
        again = rows.filter(assignment_id="eval-reverse_text-0/0").sort("round").select("round", "replaced")
        assert again.rows() == [(0, True), (1, False)] and rows["replaced"].to_list().count(False) == 4
        assert score["average"] == pytest.approx(average) and score["errors"] == {"infrastructure": 1}

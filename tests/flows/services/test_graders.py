"""The graders of a replay: real processes that score recorded traces, with no model, engine or environment server."""

import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import GraderProcesses, grader_digest
from storage.store import open_store
from tasks.inference.grading.client import GraderLost, answers
from tasks.rollout.regrade import STAGE
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import perform
from tests.fixtures.builders import stage_of
from tests.fixtures.faults import happened
from tests.fixtures.recorded import example_of, rows_of, scored, trace_of

pytestmark = pytest.mark.engine

PLUGINS = Path(__file__).parents[2] / "fixtures" / "plugins"
REPLIES = ("<rev>cba</rev>", "<rev>cb</rev>", "cba")
DUEL = {"name": "duel", "taskset": {"id": "duel"}}
EXAMPLE = '{"prompt":"Reverse inside <rev>: abc","text":"abc"}'


@pytest.fixture
def plugins(monkeypatch):
    """Make the tests' own tasksets importable, here and in the processes that are started."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))


@pytest.fixture
def supervisor(tmp_path):
    with Supervisor("regrading", tmp_path / "logs") as started:
        yield started


def config(*environments):
    return RunConfig.model_validate({"seed": 7, "environments": environments, "replay": {"regrade": True}})


def reverse(**task):
    return {"name": "reverse", "taskset": {"id": "sample_reverse_text", "num_examples": 4, "task": task}}


@pytest.fixture
def graders(supervisor):
    """Return the graders of environments; without any, of the reversals."""
    return lambda *environments: GraderProcesses(supervisor, config(*(environments or (reverse(),))))


def reversals():
    """Rows of an example and of three answers to it, as verifiers scored them when they were made."""
    from sample_reverse_text.taskset import ReverseTextData, ReverseTextTask

    task = ReverseTextTask(ReverseTextData(prompt="Reverse inside <rev>: abc", text="abc"))
    made = {str(number): [scored(trace_of(task, [reply]), task)] for number, reply in enumerate(REPLIES)}
    return {"examples": example_of("reverse", EXAMPLE), **rows_of(made, "reverse")}


def planted(context, rows):
    """Write the rows as if rollout and examples had made them."""

    def stage(name, *names):
        return stage_of(name, lambda tables, config: {each: rows[each] for each in names}, names)

    return perform(stage("rollout", "traces", "messages"), context, 2), perform(
        stage("examples", "examples"), context, 0
    )


@pytest.mark.nightly
def test_a_changed_reward_function_is_another_piece_of_work(tmp_path):
    store = open_store(tmp_path / "store")
    as_it_was = config(reverse())
    stricter = {"similarity": {"fn": f"{PLUGINS / 'stricter.py'}:exactly", "weight": 3.0}}
    changed = config(reverse(rewards=stricter))
    digests = [grader_digest(each.environments) for each in (as_it_was, changed)]
    assert digests[0] != digests[1]
    done, rows = [], reversals()
    for each, digest in zip((as_it_was, changed), digests, strict=True):
        context = RunContext(store, "replayed", each, {})
        refs = planted(context, rows)
        with Supervisor("again", tmp_path / digest[:4]) as own:
            services = Services(graders=GraderProcesses(own, each))
            done.append(perform(STAGE, context, 2, refs, services=services, extra_inputs={"graders": digest}))
            assert [handle.spec.name for handle in own._handles] == ["grader reverse"], "nothing else was started"
    recorded = context.table("traces", [refs[0]])
    same, other = (context.table("traces", [each, *refs]) for each in done)
    assert recorded["reward"].to_pylist() == [1.0, 0.8, 0.0] and other["reward"].to_pylist() == [3.0, 0.0, 0.0]
    assert same.drop_columns(["scoring_seconds"]).equals(recorded.drop_columns(["scoring_seconds"]))
    assert context.table("regrades", [done[0]])["changed"].to_pylist() == [False] * 3
    compared = context.table("regrades", [done[1]])
    assert compared["reward_before"].to_pylist() == [1.0, 0.8, 0.0]
    assert compared["reward"].to_pylist() == [3.0, 0.0, 0.0]
    assert compared["changed"].to_pylist() == [True, True, False]


@pytest.mark.fault("services", "a grader is killed", "it comes back, the same scores")
def test_a_killed_grader_comes_back(supervisor, graders, plugins):
    rows = reversals()
    grading = graders()
    first = grading.scores(**rows)
    handle = supervisor._handles[0]
    os.kill(handle.report["pid"], signal.SIGKILL)
    happened(f"SIGKILL to {handle.report}")
    assert grading.scores(**rows).drop_columns(["seconds"]).equals(first.drop_columns(["seconds"]))
    assert handle.generation == 2


def test_who_does_not_know_the_key_is_not_served(supervisor, graders):
    rows, grading = reversals(), graders()
    grading.begin()
    address = supervisor._handles[0].wait()["address"]
    with pytest.raises(GraderLost, match="digest"):
        answers(address, "a guess")
    assert grading.scores(**rows)["reward"].to_pylist() == [1.0, 0.8, 0.0], "and it serves on"


@pytest.mark.nightly
def test_two_environments_are_scored_each_by_its_own(graders, plugins):
    import duel

    task = duel.DuelTask(duel.DuelData(prompt="p"))
    other = rows_of({"d": [trace_of(task, ["word"], "left"), trace_of(task, ["wo"], "right")]}, "duel")
    own = reversals()
    rows = {name: pa.concat_tables([own[name], other[name]]) for name in ("traces", "messages")}
    both = graders(reverse(), DUEL)
    examples = pa.concat_tables([own["examples"], example_of("duel", '{"prompt":"p"}')])
    assert both.scores(examples, **rows)["reward"].to_pylist() == [1.0, 0.8, 0.0, 2 * 4 + 1.0, 2 * 2 + 0.0]
    with pytest.raises(ConfigError, match="environment 'duel', the config has: reverse"):
        graders().scores(examples, **other)


@pytest.mark.nightly
def test_what_needs_a_rollout_has_no_score(supervisor, graders, plugins):
    import duel

    grading = graders(DUEL)

    def scores(fault):
        task = duel.DuelTask(duel.DuelData(prompt="p", fault=fault))
        rows = rows_of({"d": [trace_of(task, ["word"], "left")]}, "duel")
        return grading.scores(example_of("duel", '{"prompt":"p"}'), **rows)["reward"].to_pylist()

    assert scores("state") == [None]
    assert scores("none") == [9.0]
    assert supervisor._handles[0].generation == 1

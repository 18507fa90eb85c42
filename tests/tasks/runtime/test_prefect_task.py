"""A stage as a Prefect task: where it runs, how long it may take, and with which tags."""

import pickle

from prefect import tags
from prefect.context import TagsContext
from prefect.states import Completed

from configs.run import RunConfig
from storage.store import open_store
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.training import stage as training
from tasks.training.stage import STAGE


def test_tags_of_the_flow_run_do_not_reach_the_task(monkeypatch):
    seen = []
    task = StageTask(STAGE)

    def called(**arguments):
        seen.append(set(TagsContext.get().current_tags))
        return Completed(data="done")

    monkeypatch.setattr(task, "_local_task", lambda: called)
    place = None
    with tags("run:x", "host:y"):
        assert TagsContext.get().current_tags == {"run:x", "host:y"}
        task(place, 0)
        assert TagsContext.get().current_tags == {"run:x", "host:y"}
    assert seen == [set()]


def test_a_place_travels_as_what_it_is_opened_from(tmp_path):
    context = RunContext(open_store(tmp_path / "store"), "a", RunConfig(name="a", seed=7), {"python": "3"})
    there = pickle.loads(pickle.dumps(context))
    assert (there.run, there.config, there.versions) == (context.run, context.config, context.versions)
    assert there.store.root.address == context.store.root.address
    work = filtering.STAGE, 2, {"rollout": "k"}
    assert there.key(*work) == context.key(*work)


def test_only_stages_that_wait_for_nobody_go_elsewhere_or_have_a_time_limit():
    assert [each.STAGE.may_block for each in (filtering, packing, rollout, training, gate)] == [False] * 2 + [True] * 3
    task = StageTask(packing.STAGE)
    assert task.task.timeout_seconds is None and task.task.retries == 2
    assert task._local_task().timeout_seconds and task._local_task().retries == 2
    assert StageTask(training.STAGE)._local_task().timeout_seconds is None

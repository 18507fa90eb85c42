"""What a task runner's workers are handed: a place that opens itself again, and errors that they can bring back."""

import pickle
from pathlib import Path

from configs.run import RunConfig
from storage.store import open_store
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.training import stage as training


def test_a_place_travels_as_what_it_is_opened_from(tmp_path: Path) -> None:
    context = RunContext(open_store(tmp_path / "store"), "a", RunConfig(name="a", seed=7), {"python": "3"})
    there = pickle.loads(pickle.dumps(context))
    assert (there.run, there.config, there.versions) == (context.run, context.config, context.versions)
    assert there.store.root.address == context.store.root.address
    key = context.key(filtering.STAGE, 2, {"rollout": "k"})
    assert there.key(filtering.STAGE, 2, {"rollout": "k"}) == key


def test_only_stages_that_wait_for_nobody_go_elsewhere_or_have_a_time_limit() -> None:
    waits = {stage.name: StageTask(stage).waits for stage in (filtering.STAGE, packing.STAGE, rollout.STAGE)}
    assert waits == {"filtering": False, "packing": False, "rollout": True}
    assert StageTask(training.STAGE).waits and StageTask(gate.STAGE).waits
    task = StageTask(packing.STAGE)
    assert task.task.timeout_seconds is None and task.task.retries == 2
    assert task._local_task().timeout_seconds and task._local_task().retries == 2
    assert StageTask(training.STAGE)._local_task().timeout_seconds is None

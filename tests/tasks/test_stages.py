"""The registry of stages agrees with what the stages declare, and with the lists that cannot be derived from it."""

import subprocess
import sys

import pytest

from configs.replay import ORDER
from tasks import stages
from tasks.runtime.services import PROCESSES, WAITS_FOR
from tasks.stage_tasks import TASKS, services_of, stage_of
from tasks.stages import BY_NAME, STAGES


def test_the_order_is_the_one_in_which_stages_make_what_others_read():
    """Rows of a step's own: state of the step before, and policies, come from elsewhere."""
    made = set()
    for each in STAGES:
        if each.scope != "evaluation":
            assert {*stage_of(each.name).reads} <= made, f"{each.name} comes before what it reads"
            made |= {*stage_of(each.name).writes}


@pytest.mark.parametrize("each", STAGES, ids=lambda each: each.name)
def test_every_stage_is_declared_as_it_is_registered(each):
    of_rollouts = each.name == stages.EVALUATION
    assert {task.stage.name for task in TASKS[each.name]} == {stages.ROLLOUT if of_rollouts else each.name}
    assert all(each.table in task.stage.writes for task in TASKS[each.name])


def test_lists_that_cannot_be_derived_agree_with_the_registry():
    assert (*TASKS,) == stages.names()
    assert ORDER == stages.REPLAYABLE
    assert {*WAITS_FOR} == {*PROCESSES, "approve", "example_source"}
    assert {service for each in STAGES for service in services_of(each.name)} == {*PROCESSES}
    assert services_of("rollout") == ("engine", "teachers", "environments", "graders") and services_of("examples") == ()


def test_the_derived_lists():
    assert stages.STEP_STAGES[:4] == ("assignment", "rollout", "demonstration", "preference")
    assert stages.SAMPLING == ("rollout", "demonstration", "preference", "import")
    assert " ".join(stages.LINEAGE) == (
        "examples assignment rollout regrade judging filtering reference advantage packing training"
    )
    assert {*stages.names()} - {*stages.REPEATABLE} == {
        "rollout",
        "import",
        "regrade",
        "judging",
        "reference",
        "gate",
        "evaluation",
    }
    assert stages.makers("traces") == ("judging", "regrade", "rollout") and stages.makers("verdicts") == ("filtering",)
    assert [BY_NAME[name].colour for name in ("rollout", "training", "evaluation", "examples")] == [0, 1, 2, 7]


def test_importing_the_registry_is_light():
    heavy = ("torch", "vllm", "verifiers", "transformers", "prefect", "pydantic", "pyarrow", "numpy")
    code = f"import sys, tasks.stages; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

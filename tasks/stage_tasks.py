"""Who does the work of each stage. Stages do not know each other; here all of them are known."""

from collections.abc import Mapping
from typing import Any

from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.exchange import trace_import
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.judging import stage as judging
from tasks.metrics import stage as metrics
from tasks.packing import stage as packing
from tasks.rollout import demonstration, preference, regrade
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.services import PROCESSES
from tasks.runtime.stage import Stage
from tasks.stages import EVALUATION, EVALUATION_ASSIGNMENT, ROLLOUT
from tasks.training import policy as policy_import
from tasks.training import stage as training

TASKS: Mapping[str, tuple[StageTask, ...]] = {
    "policy_import": (policy_import.task,),
    "examples": (examples.task, examples.demonstration_task, examples.preference_task, trace_import.examples_task),
    "assignment": (assignment.task, trace_import.assignment_task),
    ROLLOUT: (rollout.task, rollout.queue_task),
    "demonstration": (demonstration.task,),
    "preference": (preference.task,),
    "import": (trace_import.task,),
    "regrade": (regrade.task,),
    "judging": (judging.task,),
    "filtering": (filtering.task,),
    "reference": (reference.task,),
    "advantage": (advantage.task,),
    "packing": (packing.task,),
    "gate": (gate.task,),
    "training": (training.task,),
    "metrics": (metrics.task,),
    EVALUATION_ASSIGNMENT: (assignment.evaluation_task,),
    EVALUATION: (rollout.task,),
}
"""The tasks of every registered stage, by its name; several where its rows come from several sources."""


def stage_of(name: str) -> Stage[Any]:
    """Return the declaration of a registered stage in a training run."""
    return TASKS[name][0].stage


def services_of(name: str) -> tuple[str, ...]:
    """Return the processes that a stage needs alive, in the order in which they start; none for an unknown name."""
    stages = [task.stage for task in TASKS.get(name, ())]
    return tuple(dict.fromkeys(each for stage in stages for each in stage.services if each in PROCESSES))

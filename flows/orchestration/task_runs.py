"""What of a run's work is a task run in Prefect: each stage, or none; what the ledger had is shown as well.

A page of Prefect draws up to some thousand task runs, and its server takes in some dozen a second. So a long run has a
line in the log for each step alone, and work that was found is one task run where it is much. From some hundred task
runs on, those of a step are inside one.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Literal

from flows.orchestration.server import current_flow_run
from flows.reporting.messages import plural
from tasks.runtime.prefect_task import StageTask, StepTask, call_with_retries, report_cached
from tasks.runtime.stage import Ref

_log = logging.getLogger("stagecoach")
MOST_STAGES = 2000
"""Pieces of work up to which each is a task run: Prefect's pages draw no graph of more."""
MOST_FLAT = 100
"""Pieces of work up to which the graph has each by itself; of more it has a node for each step, which opens."""
MOST_FOUND = 100
"""Found pieces of work up to which each is a task run: they come at once, and a server takes in some 25 a second."""


class TaskRuns:
    """The task runs of one run in the flow run around: which of its work they show, and their tags."""

    def __init__(self, run: str, wanted: Literal["auto", "stages", "none"]) -> None:
        self._run, self._wanted = run, wanted
        self._planned: Sequence[Ref] = ()
        self._summed_up = False
        self._lock = threading.Lock()
        self._steps: dict[int, StepTask | None] = {}
        """The steps that have a task run; None where it has ended."""
        self._ended = False

    def plan(self, planned: Sequence[Ref]) -> None:
        """Say which results the run consists of, found or to come."""
        self._planned = planned

    @property
    def shows_stages(self) -> bool:
        """Whether each stage is a task run."""
        return self._wanted == "stages" or (self._wanted == "auto" and len(self._planned) <= MOST_STAGES)

    def caller(self, task: StageTask, step: int, label: str) -> Callable[[Callable[[], Ref]], Ref]:
        """Return the function that calls a stage's work, as a task run where stages are shown.

        What is evaluated is a policy: that is a part of no step.
        """
        if not self.shows_stages:
            return call_with_retries
        call = partial(task, step, label=label, tags=self._tags(label))
        if label.startswith("evaluation") or len(self._planned) <= MOST_FLAT or current_flow_run() is None:
            return call

        def in_step(work: Callable[[], Ref]) -> Ref:
            task_run = self._step(step)
            return task_run.call(partial(call, work)) if task_run else call(work)

        return in_step

    def show_found(self, task: StageTask, step: int, label: str, ref: Ref) -> None:
        """Show a piece of work that the ledger had, or all of them at the first one where they are many."""
        if self._wanted == "none" or current_flow_run() is None:
            return
        found = [each for each in self._planned if not each.computed]
        if len(found) > MOST_FOUND:
            if not self._summed_up:
                self._summed_up = True
                report_cached(found_message(found), [f"run:{self._run}"])
        elif self.shows_stages:
            self.caller(task, step, label)(lambda: ref)

    def end_step(self, step: int, message: str, ending: str = "finished") -> None:
        """End the task run of a step, if it has one; its state has the message and fits the ending."""
        with self._lock:
            task = self._steps.get(step)
            if task:
                self._steps[step] = None  # what comes later, such as an evaluation's examples, stands by itself
        if task:
            task.end(ending, message)

    def end(self, ending: str) -> None:
        """End the task runs of the steps under way, as the run has ended."""
        with self._lock:
            self._ended = True  # threads that still sample begin no step that nobody would end
        for step in list(self._steps):
            self.end_step(step, f"the run has ended: {ending}", ending)

    def _step(self, step: int) -> StepTask | None:
        with self._lock:
            if step not in self._steps:
                self._steps[step] = None if self._ended else self._begin(step)
            return self._steps[step]

    def _begin(self, step: int) -> StepTask | None:
        try:
            return StepTask(step, [f"run:{self._run}"])
        except CancelledError:  # a picture of the work is no reason to lose the work
            _log.warning("Prefect begins no task run for step %d: its stages stand by themselves", step)
            return None

    def _tags(self, label: str) -> list[str]:
        return [f"stage:{label}", f"run:{self._run}"]


def found_message(found: Sequence[Ref]) -> str:
    """Return in a line what the ledger had: how much, and of which stages."""
    stages = ", ".join(f"{stage} {count:,}" for stage, count in Counter(ref.stage for ref in found).items())
    return f"{plural(len(found), 'piece')} of work: {stages}"

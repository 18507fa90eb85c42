"""What of a run's work is a task run in Prefect: each stage, each step, or none; what the ledger had is shown as well.

A page of Prefect draws up to some thousand task runs, and its server takes in some dozen a second. So a long run shows
steps in place of stages, and work that was found is one task run where it is much.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from flows.orchestration.server import current_flow_run
from flows.reporting.formats import describe_scores
from flows.reporting.messages import plural, step_message
from tasks.runtime.prefect_task import StageTask, call_with_retries, report_task_run
from tasks.runtime.stage import Ref

MOST_STAGES = 2000
"""Pieces of work up to which each is a task run: Prefect's pages draw no graph of more."""
MOST_FOUND = 100
"""Found pieces of work up to which each is a task run: they come at once, and a server takes in some 25 a second."""
Shown = Literal["stages", "steps", "none"]


class TaskRuns:
    """The task runs of one run in the flow run around: which of its work they show, and their tags."""

    def __init__(self, run: str, wanted: Literal["auto", "stages", "steps", "none"]) -> None:
        self._run, self._wanted = run, wanted
        self._planned: Sequence[Ref] = ()
        self._summed_up = False
        self._begun: dict[int, datetime] = {}
        """When the first stage of each step under way was begun."""

    def plan(self, planned: Sequence[Ref]) -> None:
        """Say which results the run consists of, found or to come."""
        self._planned = planned

    @property
    def shown(self) -> Shown:
        """What is a task run."""
        if self._wanted != "auto":
            return self._wanted
        return "stages" if len(self._planned) <= MOST_STAGES else "steps"

    def caller(self, task: StageTask, step: int, label: str) -> Callable[[Callable[[], Ref]], Ref]:
        """Return the function that calls a stage's work, as a task run where stages are shown."""
        if label == task.stage.name:  # an evaluation has the version of its policy for a step
            self._begun.setdefault(step, datetime.now(UTC))
        if self.shown != "stages":
            return call_with_retries
        return partial(task, step, label=label, tags=self._tags(label))

    def show_found(self, task: StageTask, step: int, label: str, ref: Ref) -> None:
        """Show a piece of work that the ledger had, or all of them at the first one where they are many."""
        if self.shown == "none" or current_flow_run() is None:
            return
        found = [each for each in self._planned if not each.computed]
        if len(found) > MOST_FOUND:
            if not self._summed_up:
                self._summed_up = True
                report_task_run("cached", found_message(found), cached=True, tags=[f"run:{self._run}"])
        elif self.shown == "stages":
            task(step, lambda: ref, label=label, tags=self._tags(label))

    def finish_step(self, step: Mapping[str, Any]) -> None:
        """Show a finished step where steps are shown."""
        begun = self._begun.pop(step["step"], None)
        if self.shown == "steps" and current_flow_run() and (step["computed"] or not self._summed_up):
            message = step_message(step)
            report_task_run(f"step-{step['step']}", message, not step["computed"], begun, self._tags("step"))

    def finish_evaluation(self, scored: Mapping[str, Any], computed: bool) -> None:
        """Show a finished evaluation where steps are shown."""
        if self.shown == "steps" and current_flow_run() and (computed or not self._summed_up):
            name = "-".join(filter(None, ("evaluation", scored["set"], str(scored["version"]))))
            message = "; ".join(describe_scores(each) for each in scored["scores"])
            report_task_run(name, message, not computed, tags=self._tags("evaluation"))

    def _tags(self, label: str) -> list[str]:
        return [f"stage:{label}", f"run:{self._run}"]


def found_message(found: Sequence[Ref]) -> str:
    """Return in a line what the ledger had: how much, of which stages, computed by which runs."""
    stages = ", ".join(f"{stage} {count:,}" for stage, count in Counter(ref.stage for ref in found).items())
    runs = ", ".join(f"{run} {count:,}" for run, count in Counter(ref.run for ref in found).most_common())
    return f"{plural(len(found), 'piece')} of work: {stages}; computed by: {runs}"

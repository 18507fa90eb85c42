"""What of a run's work is a task run in Prefect: each stage, or none; what the ledger had is shown as well.

A page of Prefect draws up to some thousand task runs, and its server takes in some dozen a second. So a long run has a
line in the log for each step alone, and work that was found is one task run where it is much.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from flows.orchestration.server import current_flow_run
from flows.reporting.messages import plural
from tasks.runtime.prefect_task import StageTask, call_with_retries, report_cached
from tasks.runtime.stage import Ref

MOST_STAGES = 2000
"""Pieces of work up to which each is a task run: Prefect's pages draw no graph of more."""
MOST_FOUND = 100
"""Found pieces of work up to which each is a task run: they come at once, and a server takes in some 25 a second."""


class TaskRuns:
    """The task runs of one run in the flow run around: which of its work they show, and their tags."""

    def __init__(self, run: str, wanted: Literal["auto", "stages", "none"]) -> None:
        self._run, self._wanted = run, wanted
        self._planned: Sequence[Ref] = ()
        self._summed_up = False

    def plan(self, planned: Sequence[Ref]) -> None:
        """Say which results the run consists of, found or to come."""
        self._planned = planned

    @property
    def shows_stages(self) -> bool:
        """Whether each stage is a task run."""
        return self._wanted == "stages" or (self._wanted == "auto" and len(self._planned) <= MOST_STAGES)

    def caller(self, task: StageTask, step: int, label: str) -> Callable[[Callable[[], Ref]], Ref]:
        """Return the function that calls a stage's work, as a task run where stages are shown."""
        return partial(task, step, label=label, tags=self._tags(label)) if self.shows_stages else call_with_retries

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
            task(step, lambda: ref, label=label, tags=self._tags(label))

    def _tags(self, label: str) -> list[str]:
        return [f"stage:{label}", f"run:{self._run}"]


def found_message(found: Sequence[Ref]) -> str:
    """Return in a line what the ledger had: how much, and of which stages."""
    stages = ", ".join(f"{stage} {count:,}" for stage, count in Counter(ref.stage for ref in found).items())
    return f"{plural(len(found), 'piece')} of work: {stages}"

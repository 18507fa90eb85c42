"""A run as it is watched from outside: what of it is new since the last look at the store, for the live panel."""

from collections.abc import Sequence
from typing import Any

from configs.run import RunConfig
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.scores import recorded_evaluations
from flows.queries.store_reader import StoreReader
from flows.reporting.messages import measured_step, result_lines
from flows.reporting.panel import Panel
from storage.errors import StoreError


class Watched:
    """What was seen of a run so far."""

    def __init__(self, reader: StoreReader, run: str, config: RunConfig) -> None:
        self._reader, self._run, self._config = reader, run, config
        self._mark = ""
        self._num_steps = 0
        self._evaluated: set[tuple[str, int, int]] = set()
        self._steps: list[dict[str, Any]] = []
        self._scores: list[str] = []

    def show(self, panel: Panel) -> None:
        """Show what is new. Where the store cannot be read for a moment, it says so, and the next look tells."""
        mark = self._reader.mark
        if mark == self._mark:
            return
        try:
            still = self._reader.still()
            steps = numbers(still, self._run)
            self._show_steps(panel, [each for each in steps if each.work.finished])
            self._show_evaluations(panel, still)
            self._show_present(panel, next((each for each in steps if not each.work.finished), None))
        except StoreError as problem:
            panel.note(str(problem).partition("\n")[0])
            return
        self._mark = mark

    def _show_steps(self, panel: Panel, finished: Sequence[StepNumbers]) -> None:
        for each in finished[self._num_steps :]:
            stages = {name: took for (_, name), took in each.values.items() if name.startswith("timing/stage/")}
            facts = measured_step(each.step, each.values) | {"seconds": stages}
            self._steps.append(facts)
            panel.step(facts | {"update": {"loss": each.value("updates/loss/mean")}})
        self._num_steps = max(self._num_steps, len(finished))

    def _show_evaluations(self, panel: Panel, reader: StoreReader) -> None:
        for each in recorded_evaluations(reader.store, self._run, self._config):
            name = each.set_name, each.version, len(each.rounds)
            if name not in self._evaluated:
                self._evaluated.add(name)
                found = each.scores_in(reader.store, self._config).described
                self._scores += panel.evaluation(found["version"], found["scores"], found["set"])

    def _show_present(self, panel: Panel, present: StepNumbers | None) -> None:
        """Say which rollouts of the step that is under way are committed, and what is done of it."""
        if present is None:
            panel.stage(None, "")  # what an earlier look has named is done
            return
        lineages = present.work.lineages
        committed = sum(each.traces.num_rows("traces") for each in lineages)
        assignment = self._config.assignment
        wanted = assignment.groups_per_step * assignment.group_size
        done = [work.stage for work in present.work.works if work.finished]
        if lineages and not all(each.traces.finished for each in lineages):
            panel.stage(present.step, f"rollout {committed}/{wanted}")
        else:
            panel.stage(present.step, f"{done[-1]} is done" if done else "under way")

    def summary(self) -> list[str]:
        """Return the results of the run so far, in lines."""
        return [*result_lines(self._steps), *self._scores[-3:]]

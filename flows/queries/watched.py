"""Watched: a run that another process works on, as the live panel shows it: what is new since the last look."""

from typing import Any

from configs.run import RunConfig
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.scores import recorded_evaluations
from flows.queries.store_reader import StoreReader
from flows.reporting.messages import measured_step, outcome_message
from flows.reporting.panel import Panel
from storage.errors import StoreError


class Watched:
    """What was seen of a run so far."""

    def __init__(self, reader: StoreReader, run: str, config: RunConfig) -> None:
        self._reader, self._run, self._config = reader, run, config
        self._mark = ""
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
            for entry in [entry for entry in steps if entry.work.finished][len(self._steps) :]:
                self._show_step(panel, entry)
            self._show_evaluations(panel, still)
            self._show_present(panel, next((entry for entry in steps if not entry.work.finished), None))
        except StoreError as problem:
            panel.note(str(problem).partition("\n")[0])
            return
        self._mark = mark

    def _show_step(self, panel: Panel, entry: StepNumbers) -> None:
        loss = entry.value("updates/loss/mean")
        self._steps.append(
            measured_step(entry.step, entry.values) | {"update": None if loss is None else {"loss": loss}}
        )
        panel.step(self._steps[-1])

    def _show_evaluations(self, panel: Panel, reader: StoreReader) -> None:
        for entry in recorded_evaluations(reader.store, self._run, self._config):
            name = entry.set_name, entry.version, len(entry.rounds)
            if name not in self._evaluated:
                self._evaluated.add(name)
                scores = entry.scores_in(reader.store, self._config).described
                self._scores += panel.evaluation(scores["version"], scores["scores"], scores["set"])

    def _show_present(self, panel: Panel, present: StepNumbers | None) -> None:
        """Say which rollouts of the unfinished step are committed, and what is done of it."""
        if present is None:
            panel.stage(None, "")  # what an earlier look has named is done
            return
        lineages, assignment = present.work.lineages, self._config.assignment
        done = [f"{work.stage} is done" for work in present.work.works if work.finished]
        if lineages and not all(lineage.traces.finished for lineage in lineages):
            committed = sum(lineage.traces.num_rows("traces") for lineage in lineages)
            done = [f"rollout {committed}/{assignment.groups_per_step * assignment.group_size}"]
        panel.stage(present.step, done[-1] if done else "under way")

    def summary(self) -> list[str]:
        """Return the results of the run so far, in lines."""
        return [outcome_message({"steps": self._steps}), *self._scores[-3:]]

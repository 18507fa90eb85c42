"""Watchers: what makes a session's events visible, in a panel, in Prefect and in Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from flows.reporting.artifacts import RunArtifacts
from flows.reporting.formats import environment_title, with_interval
from flows.reporting.panel import Panel
from flows.reporting.tracking import Monitor

PUBLISHED_TIMES = 20
"""Artifacts are renewed about this often in a run: each renewal is kept in Prefect's database for ever."""


class PanelWatcher:
    """Shows events in a panel."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Show one event; those that a panel has no place for are left out."""
        show = getattr(self, f"_{event}", None)
        if show is not None:
            show(**facts)

    def _plan(self, missing: list[Any], num_pieces: int) -> None:
        found = num_pieces - len(missing)
        if missing:
            self._panel.note(f"{len(missing)} pieces of work to do, {found} are in the ledger")
        else:
            self._panel.note(f"nothing to compute: all {found} pieces of work are in the ledger")

    def _prefect(self, url: str) -> None:
        self._panel.ui_url = url
        self._panel.note(f"Prefect: {url}")

    def _note(self, text: str) -> None:
        self._panel.note(text)

    def _stage(self, stage: str, step: int, evaluating: bool) -> None:
        # An evaluation goes on beside the steps, and has the version of its policy for a step.
        self._panel.stage(None if evaluating else step, f"evaluation: {stage}" if evaluating else stage)

    def _step(self, step: int, tokens: int, seconds: Mapping[str, float], **measured: Any) -> None:
        values = measured if self._panel.measure == "reward" else measured["update"] or {}
        value = values.get(self._panel.measure)
        self._panel.step(step, value, tokens, sum(seconds.values()))

    def _evaluation(self, version: int, scores: list[dict[str, Any]], **facts: Any) -> None:
        for each in scores:
            where = environment_title(facts.get("set", ""), each["environment"])
            self._panel.note(f"evaluation of policy {version} on {where}: {describe_scores(each)}")


class ArtifactWatcher:
    """Keeps the artifacts in Prefect up to date."""

    def __init__(self, artifacts: RunArtifacts, num_steps: int) -> None:
        self._artifacts = artifacts
        self._every = max(1, num_steps // PUBLISHED_TIMES)
        self._num_steps = num_steps
        self._steps: list[Mapping[str, Any]] = []
        self._prefect = False

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Collect finished steps; publish them once in a while and at the end, while there is a Prefect API."""
        if event == "prefect":
            self._prefect = True
        if event == "comparison" and self._prefect and facts["rows"]:
            self._artifacts.publish_comparison(facts["rows"])
        if event == "step":
            self._steps.append(facts)
            last = len(self._steps) == self._num_steps
            if self._prefect and facts["computed"] and (last or len(self._steps) % self._every == 0):
                self._artifacts.publish(self._steps)


class MonitorWatcher:
    """Sends the metrics of computed steps and evaluations to Weights & Biases, where it was asked for."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._last = 0
        """The last step that was logged."""

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Log what was computed now; what was found was logged by the run that computed it."""
        if event == "step" and facts["computed"]:
            self._last = max(self._last, facts["step"])
            self._monitor.log(facts["step"], facts["metrics"])
        if event == "evaluation" and facts["computed"]:
            # It may come after the steps that it went on beside, and what is older than the last is not taken there.
            at = max(self._last, facts["version"])
            for each in facts["scores"]:
                if each["average"] is not None:
                    where = "/".join(filter(None, (facts.get("set"), each["environment"])))
                    figures = {f"evaluation/{where}/average": each["average"], "evaluation/version": facts["version"]}
                    self._monitor.log(at, figures)


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Return one environment's scores in a line, with their confidence intervals."""
    average = "nothing was scored" if scores["average"] is None else f"avg {with_interval(scores['average'], scores)}"
    passes = [
        f"pass@{each['k']} {with_interval(each['estimate'], each)}"
        for each in scores["pass_at"]
        if each["estimate"] is not None
    ]
    errors = f"{sum(scores['errors'].values())} of {scores['num_attempts']} failed" if scores["errors"] else ""
    return ", ".join(part for part in (average, *passes, errors) if part)

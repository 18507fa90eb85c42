"""RunArtifacts: what a run shows of itself in Prefect: the reward curve with the last steps, held-out scores, progress.

Made from plain data, one mapping for a step: `step`, `reward`, `reward_std`, `tokens`, `seconds` by stage, and
`update`, the step's row of `updates`. What is absent or None is shown as a dash: it is not zero.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.reporting.bookkeeping import Bookkeeper
from flows.reporting.figures import describe_warnings
from flows.reporting.formats import (
    block_rows,
    compact_number,
    markdown_table,
    over_width,
    visible,
)
from flows.reporting.messages import losses_message

Steps = Sequence[Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]
SHOWN_STEPS = 10
CURVE_WIDTH, CURVE_ROWS = 72, 8
"""Columns and lines of the curve."""
_COLUMNS = ("reward", "reward_std", "entropy", "mismatch_kl", "grad_norm", "seconds", "tokens")
_READ = {"step", "num_traces", "num_truncated", "outcomes", "warnings", "loss", *_COLUMNS}
"""What the page reads of a step, and of its update: all else of a step, 60 kB, is let go."""
_MARKS = re.compile(r"[\\`*_{}\[\]()#!|~@]|^[-+](?=[- ]|$)|(?<=/)/|(?<=www)\.", re.IGNORECASE)
"""What markdown reads: its marks, those of lists where a text begins, and what makes a link of an address."""
_NUMBERED = re.compile(r"^\d+(?=\.(?: |$))")
_log = logging.getLogger("stagecoach")


def reward_curve(steps: Steps) -> str:
    """Return the mean reward of steps, in lines of blocks whose axis holds 0 and 1, under its last value.

    A run without rewards, supervised training, shows the loss of each step's last update instead.
    """
    rewards = [step.get("reward") for step in steps]
    losses = [(step.get("update") or {}).get("loss") for step in steps]
    name, values = ("loss", losses) if all(reward is None for reward in rewards) else ("reward", rewards)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "no scored step yet"
    # Most rewards lie between 0 and 1: with both in view two curves can be compared at a glance.
    low, high = min(0.0, *finite), max(1.0, *finite)
    lines = block_rows(over_width(values, len(values), CURVE_WIDTH), low, high, CURVE_ROWS)
    return "\n".join([f"{name} {finite[-1]:.3f}, from {low:.3g} to {high:.3g}", *lines])


def report(run_name: str, store: str, steps: Steps) -> str:
    """Return the run's page as markdown: the curve, the last steps, where the tables are."""
    last = steps[-SHOWN_STEPS:]
    measured = [{**(step.get("update") or {}), **step, "seconds": sum(step["seconds"].values())} for step in last]
    rows = [[step["step"], *(compact_number(step.get(name)) for name in _COLUMNS)] for step in measured]
    lost = [f"step {step['step']}: {losses}" for step in last if (losses := losses_message([step]))]
    parts = [
        f"# {escape(run_name)}",
        f"```\n{reward_curve(steps)}\n```",
        "\n".join(markdown_table(["step", *(name.replace("_", " ") for name in _COLUMNS)], rows)),
        *(escape(line) for line in (describe_warnings(steps), *lost) if line),
        f"Tables: {escape(store)}",
        f"At a glance: stagecoach show {escape(run_name)}",
        f"In a browser: stagecoach view --run {escape(run_name)}",
    ]
    return "\n\n".join(parts)


def _read_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in _READ}


def artifact_key(kind: str, run_name: str) -> str:
    """Return a key as Prefect wants it: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{run_name}".lower()).strip("-")


def escape(text: str) -> str:
    """Return text that markdown and HTML show as it is, on one line, with signs for what acts or hides.

    No list begins with it, in which a block of code that follows would end, and addresses in it are no links.
    """
    plain = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _NUMBERED.sub(r"\g<0>\\", _MARKS.sub(r"\\\g<0>", " ".join(plain.split())))


PUBLISHED_TIMES = 20
"""Artifacts are renewed about this often in a run."""
PUBLISHED_SECONDS = 5.0
"""Least time from one renewal to the next: a page is not read more often, and quick steps run beside it."""


class RunArtifacts:
    """Keeps a run's artifacts up to date by the events of the run; call it in the flow, where Prefect knows the run."""

    def __init__(self, run_name: str, store: str, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_name, self.store, self.num_steps = run_name, store, num_steps
        self._clock = clock
        self._keeper = Bookkeeper()
        self._ids: dict[str, Any] = {}
        """Prefect's ids of the artifacts that were made, by key."""
        self._steps: list[Mapping[str, Any]] = []
        self._has_api = False
        self._published_at = -math.inf
        self._has_warned = False

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Collect finished steps; publish them once in a while and at the end, while there is a Prefect API."""
        # Events before this one come from a session that has no API to publish to.
        self._has_api |= event == "prefect"
        if event == "step":
            self._steps.append(_read_of(facts) | {"update": _read_of(facts.get("update") or {})})
        # A run that was ended from outside still has to end its services, and soon.
        last = event == "end" and facts["ending"] == "finished"
        if self._has_api and (last or (event == "step" and facts["computed"] and self._is_due())):
            self._keeper.call(self._publish, last)
            self._published_at = self._clock()

    def _is_due(self) -> bool:
        every = max(1, self.num_steps // PUBLISHED_TIMES)
        return len(self._steps) % every == 0 and self._clock() - self._published_at >= PUBLISHED_SECONDS

    def _publish(self) -> bool:
        """Update all artifacts; return whether that worked.

        The border at which a dead API is only logged, once: a run's data do not depend on it, so the run must not.
        """
        name, percent = self.run_name, min(100.0, 100.0 * len(self._steps) / max(1, self.num_steps))
        try:
            page = report(name, self.store, self._steps)
            self._show("markdown", artifact_key("run", name), page, f"Run {escape(name)}")
            self._show("progress", artifact_key("progress", name), percent)
        except Exception as problem:
            if not self._has_warned:
                first_line = str(problem).partition("\n")[0]
                _log.warning("artifacts are not shown in Prefect for now, the run goes on: %s", first_line)
            self._has_warned = True
            return False
        return True

    def _show(self, kind: str, key: str, content: Any, description: str | None = None) -> None:
        """Make an artifact of the flow run, or renew it, also of an earlier try: one made anew is a card more."""
        from prefect import artifacts
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactUpdate
        from prefect.client.schemas.filters import ArtifactFilter
        from prefect.runtime import flow_run

        with get_client(sync_client=True) as client:
            if key not in self._ids:
                own = {"key": {"any_": [key]}, "flow_run_id": {"any_": [flow_run.id]}}
                before = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(own))
                if not before:
                    create = getattr(artifacts, f"create_{kind}_artifact")
                    self._ids[key] = create(content, key=key, description=description)
                    return
                self._ids[key] = before[0].id
            client.update_artifact(self._ids[key], ArtifactUpdate(data=content))

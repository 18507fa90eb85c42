"""Sends the figures of a run to Weights & Biases or to files of TensorBoard, where a config asks for it.

A live run and `stagecoach track` send the same rows, by `track`: one row for each step and each evaluation, its figures
named by `flows.reporting.figures`. A sink is the way to one place. W&B is offline unless a config says online.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from configs.run import RunConfig
from configs.services import TensorboardTracking, TrackingSection, WandbTracking
from flows.reporting.figures import evaluation_figures, step_figures
from flows.reporting.formats import markdown_table, visible
from flows.services.ownership import OWNER, identity

SAMPLES = "samples"
"""The name of the table of sample rollouts."""
_log = logging.getLogger("stagecoach")


class TrackingError(ValueError):
    """W&B or TensorBoard was asked for and cannot be had."""


class TrackedRow(NamedTuple):
    """What is sent of a step, or of an evaluation after so many steps."""

    step: int
    figures: Mapping[str, float]
    """By their tracked names."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Some rollouts of the step as plain values by column, the same columns in each; mostly none."""


class Sink(Protocol):
    """The way to one place that rows are sent to."""

    name: str

    @property
    def where(self) -> str:
        """Where the rows are to be seen, in a line for a person."""

    def write(self, row: TrackedRow) -> None:
        """Send a row, all of whose figures are finite."""

    def close(self, status: int = 0) -> None:
        """Send what waits and let go, with the exit status of the run; calling it again does nothing."""


def track(rows: Iterable[TrackedRow], sink: Sink) -> int:
    """Send rows, in the order of their steps, and return how many; what is not a finite number is left out, and said.

    W&B has no place for such values in a curve, and they are in the store.
    """
    count = 0
    for row in rows:
        count += 1
        kept, dropped = finite(row.figures)
        if dropped:
            _log.warning("step %d: metrics that are not finite were left out: %s", row.step, ", ".join(dropped))
        sink.write(row._replace(figures=kept))
    return count


def finite(figures: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the figures that are finite numbers, and the names of the others."""
    kept = {name: value for name, value in figures.items() if math.isfinite(value)}
    return kept, [name for name in figures if name not in kept]


@contextmanager
def open_sink(config: RunConfig, directory: Path) -> Iterator[Sink | None]:
    """Yield the sink that the config of a run asks for, None for none; it is closed when the block ends.

    `directory` takes the files of W&B and TensorBoard. Raises TrackingError.
    """
    sink: Sink | None = None
    if isinstance(config.tracking, WandbTracking):
        sink = WandbSink(config, config.tracking, directory)
    elif isinstance(config.tracking, TensorboardTracking):
        sink = TensorboardSink(config, directory / "tensorboard")
    status = 1
    try:
        yield sink
        status = 0
    finally:
        if sink is not None:
            sink.close(status)


class WandbSink:
    """A run of W&B, of the name and the id of the run in the store."""

    name = "W&B"

    def __init__(self, config: RunConfig, asked: WandbTracking, directory: Path) -> None:
        self._run: Any = _begin_wandb(config, asked, directory)
        self._run.define_metric("eval/*", step_metric="eval/version")
        self._last = 0
        """The last step that was sent."""
        files = Path(self._run.dir).parent
        self.where = f"W&B files: {files}; `wandb sync {files}` sends them"
        if asked.mode == "online":  # wandb warns who asks an offline run for its page
            self.where = f"W&B: {self._run.url}"

    def write(self, row: TrackedRow) -> None:
        """Send a row; W&B merges rows of one step, and takes none that is older than the last."""
        import wandb

        # An evaluation may end after steps that it went on beside; its own axis is `eval/version`.
        self._last = max(self._last, row.step)
        values: dict[str, Any] = dict(row.figures)
        if row.samples:
            data = [list(sample.values()) for sample in row.samples]
            values[SAMPLES] = wandb.Table(columns=list(row.samples[0]), data=data)
        self._run.log(values, step=self._last)

    def close(self, status: int = 0) -> None:
        """Finish the run; of an online one, what waits is sent first."""
        run, self._run = self._run, None
        if run is not None:
            import wandb

            run.finish(exit_code=status)
            wandb.teardown()  # ends wandb's own background process, which would last as long as this one


class TensorboardSink:
    """Event files of TensorBoard in a directory, one more for each time that a run goes on."""

    name = "TensorBoard"

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.where = f"TensorBoard files: {directory}; `tensorboard --logdir {directory}` shows them"
        self._directory = directory
        self._config = config
        self._writer: Any = None

    def write(self, row: TrackedRow) -> None:
        """Write a row, the samples as a table of text."""
        if self._writer is None:
            self._writer = self._begin(row.step)
        for name, value in row.figures.items():
            self._writer.add_scalar(name, value, row.step)
        if row.samples:
            cells = [[_cell(value) for value in sample.values()] for sample in row.samples]
            table = markdown_table(row.samples[0], cells, numbers=False)
            self._writer.add_text(SAMPLES, "\n".join(table), row.step)

    def _begin(self, step: int) -> Any:
        """Return a writer whose file replaces what earlier files of the directory have from a step on."""
        from tensorboardX import SummaryWriter

        # What was written of a step that is sent again must not be a second point of the same curve.
        # The library names files by the second: a second one of the same second would overwrite the first.
        writer = SummaryWriter(str(self._directory), purge_step=step, filename_suffix=f".{time.time_ns()}")
        settings = json.dumps(self._config.model_dump(mode="json"), indent=2)
        writer.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()), step)
        return writer

    def close(self, status: int = 0) -> None:
        """Write what waits and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _cell(value: Any) -> str:
    """Return a value for a cell of a markdown table: on one line, without the mark of columns."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(visible(text).replace("|", "\\|").split())


def _begin_wandb(config: RunConfig, asked: WandbTracking, directory: Path) -> Any:
    """Start the W&B run; the same name goes on with the same one. Converts wandb's errors to TrackingError."""
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    # For the process, too: advice that wandb has for who imports certain packages asks no settings of a run.
    wandb.setup(wandb.Settings(silent=True))
    try:
        with _mark_processes():
            return wandb.init(
                mode=asked.mode,
                project=asked.project,
                entity=asked.entity or None,
                name=config.name,
                id=config.name,
                group=asked.group or config.replay.run or None,
                job_type=asked.job_type or config.kind,
                tags=list(asked.tags) or None,
                notes=asked.notes or None,
                dir=str(directory),
                config=config.model_dump(mode="json"),
                # Statistics of the machine are sent; its code, the state of git and what the terminal shows are not.
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
                # Files of an offline run are joined by their id when they are synced; resuming would ask the network.
                resume="allow" if asked.mode == "online" else None,
            )
    except wandb.Error as problem:
        raise TrackingError(
            f"tracking.mode: W&B did not start in mode {asked.mode}: {problem} Nothing was started and nothing is "
            "lost: correct that, or take tracking.mode=offline or tracking.type=none"
        ) from problem


@contextmanager
def _mark_processes() -> Iterator[None]:
    """Let processes started within be known as this flow's, so that a sweep finds them if it is killed."""
    # wandb starts its process by itself and hands the environment on: the mark can only go through there.
    before = os.environ.get(OWNER)
    os.environ[OWNER] = identity()
    try:
        yield
    finally:
        os.environ.pop(OWNER)
        os.environ |= {OWNER: before} if before is not None else {}


def is_sampled(step: int, config: TrackingSection) -> bool:
    """Tell whether sample rollouts of a step are sent."""
    return config.samples_every > 0 and step % config.samples_every == 0


class TrackingWatcher:
    """Sends a row for each computed step and evaluation of a live run.

    The border at which trouble with a sink is only logged, once: the figures are in the store anyway.
    """

    def __init__(self, sink: Sink, config: TrackingSection) -> None:
        self._sink = sink
        self._config = config
        self._has_warned = False
        self._lost = 0
        """Services that were lost since the run began or went on."""

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Send what was computed now; what was found was sent by the run that computed it."""
        self._lost += event == "lost"
        if event not in ("step", "evaluation") or not facts["computed"]:
            return
        try:
            track([self._row(event, facts)], self._sink)
        except Exception as problem:
            if not self._has_warned:
                _log.warning("metrics no longer reach %s, the run goes on: %s", self._sink.name, problem)
            self._has_warned = True

    def _row(self, event: str, facts: Mapping[str, Any]) -> TrackedRow:
        if event == "evaluation":
            return TrackedRow(facts["version"], evaluation_figures(facts))
        # No figure of the table: that has what follows from the step's inputs, whatever happened on the way.
        lost = {"services/lost": float(self._lost)} if self._lost else {}
        samples = facts["samples"](self._config.num_samples) if is_sampled(facts["step"], self._config) else ()
        return TrackedRow(facts["step"], step_figures(facts["values"]) | lost, samples)

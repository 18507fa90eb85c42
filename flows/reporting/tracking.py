"""Metrics to Weights & Biases when asked: disabled by default, offline without any network, online with a key."""

import logging
import math
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlparse

from configs.services import WandbConfig
from flows.services.ownership import OWNER, identity

KEY = "WANDB_API_KEY"
_HOST = "https://api.wandb.ai"
_log = logging.getLogger("stagecoach")


class MonitorError(ValueError):
    """Weights & Biases was asked for and cannot be had."""


def check_monitor(config: WandbConfig) -> None:
    """Raise MonitorError, before anything expensive, when the asked mode cannot work on this machine."""
    if config.mode == "online" and not _has_key():
        raise MonitorError(
            f"wandb.mode is online and there is no key for it: set {KEY}, or run `wandb login`, "
            "or take wandb.mode=offline and `wandb sync` later. Nothing was started and nothing is lost"
        )


class Monitor:
    """One run's metrics: `with Monitor(config.wandb, "demo", directory) as monitor: monitor.log(0, metrics)`."""

    def __init__(
        self, config: WandbConfig, run_name: str, directory: Path, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Begin. `directory` takes the files of offline runs; `settings` is the resolved config, without secrets."""
        check_monitor(config)
        self._run: Any = None
        self._told = False
        if config.mode != "disabled":
            self._run = _init(config, run_name, Path(directory), settings or {})

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(0 if kind is None else 1)

    @property
    def directory(self) -> Path | None:
        """Where this run's files are, to `wandb sync` an offline one; None when disabled."""
        return None if self._run is None else Path(self._run.dir).parent

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's metrics; what is not a finite number is left out, and said so.

        The border at which trouble with the monitor is only told of, once: the numbers are in the tables anyway.
        """
        kept, dropped = finite(metrics)
        if dropped:
            _log.warning("step %d: metrics that are not finite were left out: %s", step, ", ".join(dropped))
        if self._run is None:
            return
        try:
            self._run.log(kept, step=step)
        except Exception as problem:
            if not self._told:
                _log.warning("metrics no longer reach Weights & Biases, the run goes on: %s", problem)
            self._told = True

    def close(self, status: int = 0) -> None:
        """Finish; calling it again does nothing."""
        run, self._run = self._run, None
        if run is not None:
            import wandb

            run.finish(exit_code=status)
            wandb.teardown()  # ends wandb's own background process, which would last as long as this one


def finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics that are finite numbers, and the names of the others."""
    kept = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return kept, [name for name in metrics if name not in kept]


def _init(config: WandbConfig, run_name: str, directory: Path, settings: Mapping[str, Any]) -> Any:
    """Start the run there; the same name continues the same run. Converts wandb's errors to MonitorError."""
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    try:
        with _mark_processes():
            return wandb.init(
                mode=config.mode,
                project=config.project,
                name=run_name,
                id=run_name,
                # Files of an offline run are joined by their id when they are synced; resuming would ask the network.
                resume="allow" if config.mode == "online" else None,
                dir=str(directory),
                config=dict(settings),
                # Nothing leaves the machine but what is logged: no code, no state of git, no statistics of the machine.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
                ),
            )
    except wandb.Error as problem:
        raise MonitorError(
            f"Weights & Biases did not start in mode {config.mode}: {problem}. Nothing is lost: "
            "correct that, or take wandb.mode=offline or disabled"
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
        del os.environ[OWNER]
        if before is not None:
            os.environ[OWNER] = before


def _has_key() -> bool:
    """Tell whether wandb would find a key: in the environment, or in the file that `wandb login` writes."""
    if os.environ.get(KEY):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _HOST).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC") or None).authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


class MonitorWatcher:
    """Sends the metrics of computed steps and evaluations to Weights & Biases, where it was asked for."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._last = 0
        """The last step that was logged."""
        self._lost = 0
        """Services that were lost since the run began or went on."""

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Log what was computed now; what was found was logged by the run that computed it."""
        self._lost += event == "lost"
        if event == "step" and facts["computed"]:
            self._last = max(self._last, facts["step"])
            # No metric of the table: that has what follows from the step's inputs, whatever happened on the way.
            lost = {"services/lost": self._lost} if self._lost else {}
            self._monitor.log(facts["step"], {**facts["metrics"], **lost})
        if event == "evaluation" and facts["computed"]:
            # It may come after the steps that it went on beside, and what is older than the last is not taken there.
            at = max(self._last, facts["version"])
            for each in facts["scores"]:
                if each["average"] is not None:
                    where = "/".join(filter(None, (facts.get("set"), each["environment"])))
                    figures = {f"evaluation/{where}/average": each["average"], "evaluation/version": facts["version"]}
                    self._monitor.log(at, figures)

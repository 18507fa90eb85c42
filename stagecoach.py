"""Stagecoach in Python, with the words of the command line: `import stagecoach`.

    result = stagecoach.run("demo", "training.learning_rate=1e-4", model={"path": "weights"}, name="first")
    stagecoach.replay("first", algorithm={"type": "rloo"}, name="leave-one-out")
    stagecoach.open().rollouts("first")     # a polars frame of the last step's rollouts

Items are presets, TOML files and overrides as on the command line; keywords are settings too, sections as mappings.
Nothing has to run before: a Prefect server comes with the first run and ends with this process, unless one is
configured.
"""

import asyncio
import contextvars
import ctypes
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from configs.errors import ConfigError
from configs.toml_text import toml

if TYPE_CHECKING:
    from configs.algorithms import CustomConfig
    from configs.run import RunConfig
    from flows.replays.request import ReplayRequest
    from flows.viewer.notebook import Plot, Viewer
    from tasks.advantage.algorithms.credit import Credit, GroupedTraces
    from tasks.arrays.finding import FilterInput
    from tasks.inference.grading.groups import GroupRollout
    from tasks.inference.sampling.bindings import EpisodeInfo
    from tasks.learner.losses.tokens import RlTokens

__all__ = [
    "Credit",
    "CustomConfig",
    "EpisodeInfo",
    "FilterInput",
    "GroupRollout",
    "GroupedTraces",
    "Result",
    "RlTokens",
    "demo",
    "dpo",
    "evaluate",
    "open",
    "regrade",
    "replay",
    "resume",
    "run",
    "sft",
    "train",
]
PLUGIN_MODULES = {
    "Credit": "tasks.advantage.algorithms.credit",
    "CustomConfig": "configs.algorithms",
    "EpisodeInfo": "tasks.inference.sampling.bindings",
    "FilterInput": "tasks.arrays.finding",
    "GroupRollout": "tasks.inference.grading.groups",
    "GroupedTraces": "tasks.advantage.algorithms.credit",
    "RlTokens": "tasks.learner.losses.tokens",
}
"""Where the classes are that a person's algorithm, filter or loss names: imported when one is named."""
Item = str | PathLike[str]
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    if name not in PLUGIN_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PLUGIN_MODULES[name]), name)


@dataclass(frozen=True, repr=False)
class Result:
    """What a run came to. Its numbers are in `outcome`, as plain values; its rollouts in its store."""

    run: str
    kind: str
    store: str
    outcome: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        from flows.reporting.messages import outcome_message

        rollouts = f"its rollouts: stagecoach.open({self.store!r}).rollouts({self.run!r})"
        return f"{self.kind} {self.run}: {outcome_message(self.outcome)}\n{rollouts}"

    def plot(self, *others: str, **chosen: Any) -> "Plot":
        """Return charts of the run, together with others of its store; see `Viewer.plot`."""
        return open(self.store).plot(self.run, *others, **chosen)


def run(*items: Item, name: str = "", store: Item = "", plain: bool = False, **settings: Any) -> Result:
    """Train with reinforcement learning; the same name again goes on where it stopped.

    Raises ConfigError, and what else says that nothing was started; ServiceFailed and others where the run failed,
    which then can be resumed.
    """
    return _start("train", items, settings, name, store, plain)


train = run


def sft(*items: Item, name: str = "", store: Item = "", plain: bool = False, **settings: Any) -> Result:
    """Train on demonstrations. Raises what `run` raises."""
    return _start("sft", items, settings, name, store, plain)


def dpo(*items: Item, name: str = "", store: Item = "", plain: bool = False, **settings: Any) -> Result:
    """Learn preferences of the rollouts of recorded runs, `data={"runs": [RUN]}`. Raises what `run` raises."""
    return _start("dpo", items, settings, name, store, plain)


def evaluate(
    *items: Item,
    policy: str = "",
    url: str = "",
    model: str | Mapping[str, Any] = "",
    retry_errors: int = 0,
    name: str = "",
    store: Item = "",
    plain: bool = False,
    **settings: Any,
) -> Result:
    """Score a policy on held-out examples: RUN or RUN:VERSION; the weights of `model.path` without one.

    `url` is a chat API of someone else, and `model` the model's name there. As a mapping it is the section of that
    name: `model={"path": "weights"}`. Raises what `run` raises.
    """
    given = {"policy": policy, "external.url": url, "retry_errors": retry_errors}
    if isinstance(model, Mapping):
        settings["model"] = model
    else:
        given["external.model"] = model
    own = {f"evaluation.{key}": value for key, value in given.items() if value}
    return _start("evaluate", items, {**settings, **own}, name, store, plain)


def demo(*items: Item, name: str = "", store: Item = "", plain: bool = False, **settings: Any) -> Result:
    """Train a small model from nothing to good, on this machine.

    Items are a preset that has a demo, or none, and overrides. Raises what `run` raises.
    """

    def work() -> Result:
        from flows.cli.demo import train_demo
        from flows.cli.run import run_with_panel

        presets, overrides = _files_and_overrides(items, settings)
        runner = partial(run_with_panel, plain=plain)
        return _result(*train_demo(presets, overrides, name, fspath(store), runner))

    return _call_beside_loop(work)


def resume(run: str = "latest", *items: str, store: Item = "", plain: bool = False, **settings: Any) -> Result:
    """Go on with a run of the store. Items are overrides. Raises what `run` raises."""

    def work() -> Result:
        from flows.cli.run import run_to_resume

        return _run_flow(run_to_resume(run, _overrides(items, settings), fspath(store)), plain)

    return _call_beside_loop(work)


def replay(
    run: str,
    *items: str,
    from_stage: str = "",
    until: str = "",
    steps: str = "",
    name: str = "",
    policies: str = "",
    regrade: bool = False,
    no_quarantine: bool = False,
    store: Item = "",
    plain: bool = False,
    **settings: Any,
) -> Result:
    """Do recorded steps again in a new run: shared up to a stage, done from there on. Items are overrides.

    `steps` names them: 3:10 is 3 to 9. Raises what `run` raises.
    """

    def work() -> Result:
        from flows.replays.request import ReplayRequest

        asked = ReplayRequest(
            run=run,
            from_stage=from_stage,
            until=until,
            steps=steps,
            overrides=_overrides(items, settings),
            name=name,
            store=fspath(store),
            policies=policies,
            regrade=regrade,
            quarantine=not no_quarantine,
        )
        return _run_flow(asked, plain)

    return _call_beside_loop(work)


def regrade(run: str, *items: str, until: str = "packing", **options: Any) -> Result:
    """Score the recorded rollouts of a run again with the reward functions of today, in a new run.

    `until="training"` trains on them, too; options are those of `replay`. Raises what `run` raises.
    """
    return replay(run, *items, from_stage="filtering", until=until, regrade=True, **options)


def open(store: Item = "") -> "Viewer":
    """Open a store to look at it: its runs, and every table as polars frames. Raises LayoutError where there is none.

    Without a store it is the one that commands mean: STAGECOACH_STORE, else `stagecoach-store`.
    """
    from configs.store import default_store
    from flows.viewer.notebook import Viewer

    return Viewer(fspath(store) or default_store())


def _start(
    kind: str, items: Iterable[Item], settings: Mapping[str, Any], name: str, store: Item, plain: bool
) -> Result:
    def work() -> Result:
        from flows.runtime.resolve_run import resolve_run

        files, overrides = _files_and_overrides(items, settings)
        return _run_flow(resolve_run(kind, files, overrides, name=name, store=fspath(store)), plain)

    return _call_beside_loop(work)


def _run_flow(asked: "RunConfig | ReplayRequest", plain: bool) -> Result:
    from flows.cli.run import run_with_panel
    from flows.replays.config import prepare_replay
    from flows.replays.request import ReplayRequest

    config = prepare_replay(asked) if isinstance(asked, ReplayRequest) else asked
    return _result(config, run_with_panel(config, plain=plain))


def _result(config: "RunConfig", outcome: dict[str, Any]) -> Result:
    return Result(config.name, config.kind, config.store, outcome)


def _files_and_overrides(items: Iterable[Item], settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return files and overrides of items and keywords."""
    from flows.cli.arguments import split_items

    files, overrides = split_items(fspath(item) for item in items)
    return files, [*overrides, *_assignments("", settings)]


def _overrides(items: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    files, overrides = _files_and_overrides(items, settings)
    if files:
        raise ConfigError([f"{each}: this takes overrides alone, written section.key=value" for each in files])
    return overrides


def _assignments(section: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield keywords as overrides; a mapping is a section, and None leaves a setting as it is."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _assignments(f"{section}{key}.", value)
        elif value is not None:
            yield f"{section}{key}={toml(value)}"


def _call_beside_loop(work: Callable[[], T]) -> T:
    """Call something that may start a run; in a thread of its own where this one runs an event loop, as notebooks do.

    Ctrl-C, or a notebook's button, reaches it there as well. Raises ConfigError where Prefect was imported too early.
    """
    _require_prefect_settings()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="stagecoach") as pool:
        future = pool.submit(contextvars.copy_context().run, work)
        try:
            return future.result()
        except KeyboardInterrupt:
            (thread,) = (each for each in threading.enumerate() if each.name.startswith("stagecoach_"))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
            raise


def _require_prefect_settings() -> None:
    """Refuse where a Prefect server of ours could not be used any more: Prefect reads its settings when imported."""
    from flows.orchestration.server import can_begin

    if not can_begin():
        raise ConfigError(
            [
                "Prefect was imported before and no server is configured, so that none can be brought for this run. "
                "Nothing was started. Import stagecoach and call it before Prefect, in a new process or kernel, or "
                "name a server in PREFECT_API_URL"
            ]
        )

"""run: a resolved config in Prefect's flow, with a panel; the run that `resume` continues."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.errors import ConfigError
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration import server as prefect_api
from flows.orchestration.server import one_line
from flows.orchestration.table_workers import table_workers
from flows.replays.loop import loop_replay, plan_run, trains_again
from flows.replays.request import ReplayRequest
from flows.reporting.panel import Panel
from flows.runtime.loop import loop_evaluate, loop_train
from flows.runtime.resolve_run import nothing_started, resolve_run
from flows.runtime.run import open_run
from flows.runtime.session import Session, Watcher, record_run
from storage.store import open_store

LOOPS: Mapping[str, Callable[[Session], dict[str, Any]]] = {
    "train": loop_train,
    "sft": loop_train,
    "evaluate": loop_evaluate,
    "replay": loop_replay,
}
"""The loop of each kind of run over an open session."""


def run_to_resume(name: str, overrides: Sequence[str] = (), store: str = "") -> RunConfig | ReplayRequest:
    """Return the config of a run of the store, `latest` for the newest, or the request of a replay.

    Raises ConfigError where the store has no run, or none of that name.
    """
    root = store or default_store()
    runs = open_store(root).runs
    chosen = runs.latest() if name == "latest" else name
    if chosen is None:
        raise ConfigError([f"store {root} holds no run yet: start one with `stagecoach run`"])
    with nothing_started():
        kind = runs.events(chosen)[-1].kind
    if kind == "replay":
        return ReplayRequest(run="", overrides=overrides, name=chosen, store=root)
    return resolve_run(kind, (), overrides, name=chosen, store=root)


def watch(config: RunConfig, plain: bool = False) -> dict[str, Any]:
    """Run a resolved config with a panel, of plain lines where `plain` says so; return the outcome of its flow."""
    with panel_for(config, plain) as panel:
        return run(config, (panel,))


def panel_for(config: RunConfig, plain: bool = False) -> Panel:
    """Return the panel of a run, which is live at once where it can be; `plain` asks for plain lines."""
    num_steps = 0 if config.kind == "evaluate" else config.steps
    # A replay that trains has the recorded rewards, or nearly so: what it changes is seen in the loss.
    measure = "loss" if config.kind == "sft" or trains_again(config) else "reward"
    title, first_step = f"{config.kind} {config.name}", config.replay.first_step
    return Panel(title, num_steps, plain=plain, measure=measure, first_step=first_step)


def run(config: RunConfig, watchers: tuple[Watcher, ...] = ()) -> dict[str, Any]:
    """Run a resolved config: in a Prefect flow of its kind, or without Prefect where every result is cached."""
    with open_run(config, plan_run, watchers) as session:
        if session.missing:
            return _run_in_flow(session)
        with record_run(session):
            return LOOPS[config.kind](session)


class _HeldSession:
    """The open session of a flow. It stays in this process, while a flow travels with its tasks to other workers."""

    def __init__(self, session: Any = None) -> None:
        self.session = session

    def __reduce__(self) -> tuple[type["_HeldSession"], tuple[()]]:
        return _HeldSession, ()


def _run_in_flow(session: Session) -> dict[str, Any]:
    """Run an open session in a Prefect flow. How it ended is not changed by a Prefect that cannot write that down.

    Raises what the run raised, PrefectFailed where Prefect failed before there was a run.
    """
    # Imported here and not above: Prefect takes a while, and reads which API to use when it is imported.
    import httpx
    from prefect import tags

    from flows.orchestration.run_flow import run_flow

    config, held, ends = session.config, _HeldSession(session), list[Any]()

    def work(name: str, seed: int | None, store: str) -> dict[str, Any]:
        try:
            with table_workers(config.prefect), record_run(held.session):
                outcome = LOOPS[config.kind](held.session)
        except BaseException as error:
            ends.append(error)
            raise
        ends.append(outcome)
        return outcome

    try:
        with tags(*prefect_api.run_tags(config.name, config.store)), prefect_api.needed_heartbeats():
            flow: Callable[..., dict[str, Any]] = run_flow(config.kind)(work)
            return flow(config.name, config.seed, config.store)
    except httpx.HTTPError as problem:
        if not ends:
            raise prefect_api.failure(problem) from problem
        if isinstance(ends[0], BaseException):
            raise ends[0] from problem
        session.notify("note", text=f"Prefect did not get the end of the run, which is safe: {one_line(problem)}")
        kept: dict[str, Any] = ends[0]
        return kept

"""Starts a flow from the command line, with everything that must live as long as it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.orchestration import server as prefect_api
from flows.orchestration.server import route_prefect_logs
from flows.replays.config import prepare_replay
from flows.replays.loop import loop_replay, plan_run
from flows.replays.report import summary, trains_again
from flows.replays.request import ReplayRequest
from flows.replays.sources import finished_message, finished_without_source
from flows.reporting.events import PanelWatcher
from flows.reporting.formats import before_after, console
from flows.reporting.panel import Panel
from flows.runtime.entry import watching
from flows.runtime.loops import loop_evaluate, loop_sft, loop_train
from flows.runtime.prepare import nothing_started, prepare
from flows.runtime.session import Session, Watcher, log_directory, open_session, preflight, record_run
from flows.services.engine import InferenceService
from storage.store import open_store

LOOPS: Mapping[str, Callable[[Session], dict[str, Any]]] = {
    "train": loop_train,
    "sft": loop_sft,
    "evaluate": loop_evaluate,
    "replay": loop_replay,
}
"""What the flow of each kind does with an open session."""


def start(
    kind: str,
    files: Sequence[str],
    overrides: Sequence[str],
    name: str = "",
    store: str = "",
    plain: bool = False,
) -> int:
    """Resolve a config, run the flow of `kind` and show it, in plain lines if asked; return the exit status."""
    config = prepare(kind, files, overrides, name=name, store=store)
    _tell(watch(config, plain=plain))
    where = f"{config.name} --store {config.store}"
    print(f"run {config.name} is in {config.store}; look at it with: stagecoach view --run {where}")
    print(f"or on this terminal: stagecoach show {where}")
    return 0


def replay(asked: ReplayRequest, plain: bool = False) -> int:
    """Go through recorded steps again as asked, and show it; return the exit status."""
    return replays([asked], plain=plain)


def replays(several: Sequence[ReplayRequest], plain: bool = False) -> int:
    """Do replays one after the other, each checked before the first begins; return the exit status."""
    ended = [finished_without_source(asked) for asked in several]
    configs = [prepare_replay(asked) for asked, done in zip(several, ended, strict=True) if done is None]
    for done in filter(None, ended):
        print(finished_message(done))
    for config in configs:
        outcome = watch(config, plain=plain)
        print("\n".join(summary(outcome, config)))
    return 0


def resume(name: str, overrides: Sequence[str] = (), store: str = "", plain: bool = False) -> int:
    """Go on with a run of the store, `latest` for the newest; return the exit status."""
    root = store or RunConfig().store
    runs = open_store(root).runs
    chosen = runs.latest() if name == "latest" else name
    if chosen is None:
        raise ConfigError([f"store {root} holds no run yet: start one with `stagecoach run`"])
    with nothing_started():
        kind = runs.events(chosen)[-1].kind
    if kind == "replay":
        return replay(ReplayRequest(run="", overrides=overrides, name=chosen, store=root), plain=plain)
    _tell(watch(prepare(kind, (), overrides, name=chosen, store=root), plain=plain))
    return 0


def _tell(outcome: dict[str, Any]) -> None:
    """Print how the last policy differs from the first on held-out examples, where both were tried on them."""
    if outcome.get("comparisons"):
        console().print(before_after(outcome["comparisons"]))


def watch(
    config: RunConfig,
    engine: InferenceService | None = None,
    before: Callable[[], None] = lambda: None,
    plain: bool = False,
) -> dict[str, Any]:
    """Run the flow of a resolved config with a panel, artifacts and the monitor; return what the flow returns.

    `before` is called once it is known that there is work to do. `plain` asks for plain lines on a terminal too.
    """
    with watching(config) as watchers, panel_of(config, plain) as panel:
        return run(config, (PanelWatcher(panel), *watchers), engine, before)


def panel_of(config: RunConfig, plain: bool) -> Panel:
    """Return the panel for a run of this kind."""
    num_steps = 0 if config.kind == "evaluate" else config.replay.last_step or config.steps
    measure = "loss" if config.kind == "sft" or trains_again(config) else "reward"
    return Panel(f"{config.kind} {config.name}", num_steps, plain=plain, measure=measure)


def run(
    config: RunConfig,
    watchers: tuple[Watcher, ...] = (),
    engine: InferenceService | None = None,
    before: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the flow of a resolved config: services and Prefect side by side, then the flow; or nothing at all.

    Work that is all in the ledger needs neither Prefect nor services; the watchers are told so.
    """
    with open_session(config, watchers, engine) as session:
        planned = plan_run(session.context, session.source, session.policy)
        missing = [ref for ref in planned if ref.computed]
        session.notify("plan", missing=missing, num_pieces=len(planned))
        if not missing:
            return _run_without_prefect(session)
        directory = log_directory(config)
        preflight(session, missing)
        api = begin_prefect(config)
        session.begin(missing)
        before()
        with prefect_api.termination_reported():
            session.notify("prefect", url=api.wait().ui_url)
            route_prefect_logs(directory / "prefect.log")
            return _call_flow(session)


def begin_prefect(config: RunConfig) -> prefect_api.PrefectApi:
    """Return the Prefect API of this process: the one that was begun before, the configured one, or a new one.

    Raises PrefectUnreachable where a configured one does not answer.
    """
    api = prefect_api.begin(log_directory(config).parent / "prefect", config.prefect.startup_seconds)
    return api if api.embedded else api.wait()


def _run_without_prefect(session: Session) -> dict[str, Any]:
    with record_run(session):
        return LOOPS[session.config.kind](session)


def _call_flow(session: Session) -> dict[str, Any]:
    from prefect import tags

    config = session.config
    flow = _flow(config)
    with tags(*prefect_api.run_tags(config.name, config.store)):
        outcome: dict[str, Any] = flow(name=config.name, store=config.store, **_parameters(config))
        return outcome


def _flow(config: RunConfig) -> Callable[..., Any]:
    """Return the Prefect flow of a run; importing it loads Prefect, which takes a while."""
    match config.kind:
        case "train":
            from flows.train import train

            return train
        case "sft":
            from flows.sft import sft

            return sft
        case "evaluate":
            from flows.evaluate import evaluate

            return evaluate
        case "replay":
            from flows.replay import replay

            return replay


def _parameters(config: RunConfig) -> dict[str, Any]:
    """Return what Prefect shows of a flow run; the session that is open around it has the config itself."""
    replay = config.replay
    if config.kind == "replay":
        last = "" if replay.last_step is None else str(replay.last_step)
        steps = {"steps": f"{replay.first_step}:{last}", "regrade": replay.regrade, "policies": replay.policies}
        return {"run": replay.run, "from_stage": replay.from_stage, "until": replay.until, **steps}
    if config.external:
        return {"seed": config.seed, "url": config.external.url, "url_model": config.external.model}
    last_one = {"policy": config.evaluation.policy} if config.kind == "evaluate" else {"steps": config.steps}
    return {"seed": config.seed, **last_one}

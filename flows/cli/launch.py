"""watch and run: the flow of a resolved config with its services, Prefect and panel; and the training of the demo."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import ConfigError
from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration import server as prefect_api
from flows.orchestration.server import one_line, route_prefect_logs
from flows.orchestration.states import ends_kept
from flows.replays.loop import loop_replay, plan_run, trains_again
from flows.replays.request import ReplayRequest
from flows.reporting.panel import Panel, PanelWatcher
from flows.runtime.demo_sources import (
    RECIPES,
    SEED,
    Sources,
    build,
    sources_directory,
    warm_weights,
)
from flows.runtime.entry import watching
from flows.runtime.loops import loop_evaluate, loop_sft, loop_train
from flows.runtime.preflight import preflight, require_fit
from flows.runtime.prepare import nothing_started, prepare
from flows.runtime.session import Session, Watcher, log_directory, open_session, record_run
from flows.runtime.versions import config_versions, versions
from flows.services.base import RunService, Supervisor
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers
from flows.services.learner import LearnerProcess
from storage.store import open_store
from tasks.runtime.run_context import RunContext

LOOPS: Mapping[str, Callable[[Session], dict[str, Any]]] = {
    "train": loop_train,
    "sft": loop_sft,
    "evaluate": loop_evaluate,
    "replay": loop_replay,
}
"""What the flow of each kind does with an open session."""


def run_to_resume(name: str, overrides: Sequence[str] = (), store: str = "") -> RunConfig | ReplayRequest:
    """Return what a run of the store goes on with, `latest` for the newest; what is asked for where it is a replay.

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
    return prepare(kind, (), overrides, name=chosen, store=root)


def watch(
    config: RunConfig,
    early: Sequence[RunService] = (),
    before: Callable[[], None] = lambda: None,
    plain: bool = False,
    also: tuple[Watcher, ...] = (),
) -> dict[str, Any]:
    """Run the flow of a resolved config with a panel, artifacts and tracking; return what the flow returns.

    `before` is called once it is known that there is work to do; `early` are services as `open_session` takes them.
    `plain` asks for plain lines on a terminal too; `also` are further watchers.
    """
    with watching(config) as (watchers, notes), panel_for(config, plain) as panel:
        for text in notes:
            panel.note(text)
        return run(config, (PanelWatcher(panel), *watchers, *also), early, before)


def panel_for(config: RunConfig, plain: bool = False) -> Panel:
    """Return the panel of a run, which is live at once where it can be; `plain` asks for plain lines."""
    num_steps = 0 if config.kind == "evaluate" else config.steps
    # A replay that trains has the recorded rewards, or nearly so: what it changes is seen in the loss.
    measure = "loss" if config.kind == "sft" or trains_again(config) else "reward"
    title, first_step = f"{config.kind} {config.name}", config.replay.first_step
    return Panel(title, num_steps, plain=plain, measure=measure, first_step=first_step)


def run(
    config: RunConfig,
    watchers: tuple[Watcher, ...] = (),
    early: Sequence[RunService] = (),
    before: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the flow of a resolved config: services and Prefect side by side, then the flow; or nothing at all.

    Work that is all in the ledger needs neither Prefect nor services; the watchers are notified.
    """
    with open_session(config, watchers, early) as session:
        # A dry run first: it says what is missing, and with it which services have to be started at all.
        planned = plan_run(session.context, session.source, session.policy)
        missing = [ref for ref in planned if ref.computed]
        session.task_runs.plan(planned)
        session.notify("plan", missing=missing, num_pieces=len(planned))
        if not missing:
            with record_run(session):
                return LOOPS[config.kind](session)
        # Before anything starts: what cannot work should not cost the start of an engine.
        preflight(session, missing)
        # Both take long to start: Prefect's API begins first and is waited for only when the services have begun, too.
        api = begin_prefect(config)
        session.begin(missing)
        before()
        server = api.supervisor.subscribe(session.note_service) if api.supervisor else nullcontext()
        with server, prefect_api.termination_reported():
            session.notify("prefect", url=api.wait().ui_url)
            route_prefect_logs(log_directory(config) / "prefect.log")
            return _call_flow(config, api, lambda text: session.notify("note", text=text))


def begin_prefect(config: RunConfig) -> prefect_api.PrefectApi:
    """Return the Prefect API of this process: the one that was begun before, the configured one, or a new one.

    Raises PrefectUnreachable where a configured one does not answer.
    """
    api = prefect_api.begin(log_directory(config).parent / "prefect", config.prefect.startup_seconds)
    return api if api.embedded else api.wait()


def _call_flow(config: RunConfig, api: prefect_api.PrefectApi, tell: Callable[[str], None]) -> dict[str, Any]:
    """Call the flow of a config. How it ended is not changed by a Prefect that cannot write that down; `tell` says so.

    Raises what the run raised, PrefectFailed where Prefect failed before there was a run.
    """
    import httpx

    with ends_kept() as ends:
        try:
            return _call_in_prefect(config)
        except httpx.HTTPError as problem:
            if not ends:
                raise prefect_api.failure(api.url, problem) from problem
            if isinstance(ends[0], BaseException):
                raise ends[0] from problem
            tell(f"Prefect did not get the end of the run, which is safe: {one_line(problem)}")
            outcome: dict[str, Any] = ends[0]
            return outcome


def _call_in_prefect(config: RunConfig) -> dict[str, Any]:
    # Imported here and not above: Prefect takes a while, and reads which API to use when it is imported.
    from prefect import tags

    match config.kind:
        case "train":
            from flows.train import train as flow
        case "sft":
            from flows.sft import sft as flow
        case "evaluate":
            from flows.evaluate import evaluate as flow
        case "replay":
            from flows.replay import replay as flow
    with tags(*prefect_api.run_tags(config.name, config.store)), prefect_api.needed_heartbeats():
        outcome: dict[str, Any] = flow(name=config.name, **_parameters(config))
        return outcome


def _parameters(config: RunConfig) -> dict[str, Any]:
    """Return what Prefect shows of a flow run; the session that is open around it has the config itself."""
    replay = config.replay
    rare: dict[str, Any] = {"store": config.store}
    if config.kind == "replay":
        last = "" if replay.last_step is None else str(replay.last_step)
        stages = {"run": replay.run, "from_stage": replay.from_stage, "until": replay.until}
        rare |= {"regrade": replay.regrade, "policies": replay.policies}
        return {**stages, "steps": f"{replay.first_step}:{last}", "advanced": rare}
    if config.external:
        rare |= {"url": config.external.url, "url_model": config.external.model}
        return {"seed": config.seed, "advanced": rare}
    last_one = {"policy": config.evaluation.policy} if config.kind == "evaluate" else {"steps": config.steps}
    return {"seed": config.seed, **last_one, "advanced": rare}


def train_demo(
    preset: str, overrides: Sequence[str], name: str, store: str, plain: bool
) -> tuple[RunConfig, dict[str, Any]]:
    """Make the demo's model, warm it up and train it; return the config of the training and what it came to."""
    name, root, recipe = name or preset, store or default_store(), RECIPES[preset]
    # Before anything else lies there: a store is made in an empty directory.
    fresh = not open_store(root).ledger.entries(run=f"{name}-warm-up", stage="training")
    sources = Sources(sources_directory(root, preset))
    loaded = demo_config(preset, overrides, name, root)
    resolved = resolve(loaded, config_versions(loaded))
    with Supervisor(name, log_directory(resolved)) as supervisor:
        early = early_services(supervisor, resolved, sources.model)
        for service in early:
            service.reach()  # what others run and does not answer is reported now and not after the warm-up
        if overrides:  # the presets fit, and their environments are loaded beside the services
            with nothing_started():
                require_fit(resolved, early.environments.load())
        if fresh:
            begin_beside_sources(resolved, early)
        # The weights and demonstrations are made once for a store and found again by the next demo of this preset.
        build(sources, recipe)
        if fresh:
            early.engine.begin()
        settings = [*sources.overrides, *recipe.warm_up]
        warm_up = prepare("sft", ["sft_demo"], settings, name=f"{name}-warm-up", store=root, seed=SEED)
        also = (early.begin_when_training,)
        policy = watch(warm_up, (early.learner,), before=early.engine.begin, plain=plain, also=also)["policy"]
        weights = warm_weights(root, policy["key"])
        settings = [f"model.path={weights}", *overrides]
        config = prepare("train", [preset], settings, name=name, store=root, seed=loaded.seed)
        outcome = watch(config, early, plain=plain)
    return config, outcome


def demo_config(preset: str, overrides: Sequence[str], name: str, root: str) -> RunConfig:
    """Return the config of a demo's training before its model is there; a seed that is given counts."""
    return load([preset], [f"seed={SEED}", *overrides, "model.path=", f"name={name}", f"store={root}"])


class EarlyServices(NamedTuple):
    """The services of the demo's training run, which start beside the warm-up; its learner does both."""

    engine: InferenceService
    environments: EnvironmentServers
    learner: LearnerProcess

    def begin_when_training(self, event: str, facts: Mapping[str, Any]) -> None:
        """Start the environments once the warm-up trains: before that there is more to compute than cores for it."""
        if event == "stage" and facts["stage"] == "training" and not facts["step"]:
            threading.Thread(target=self._begin_environments, name="environments", daemon=True).start()

    def _begin_environments(self) -> None:
        # After the engine: side by side they would take the learner's core as well. Who needs one gets the error.
        with suppress(Exception):
            for each in self.engine.handles:
                each.wait()
            self.environments.begin()


def early_services(supervisor: Supervisor, config: RunConfig, model: Path) -> EarlyServices:
    """Return the services of the training run, able to start before its first policy exists.

    Start-up is their longest wait. The engine starts with the weights of `model`, which are of the same shape.
    """
    context = RunContext(open_store(config.store), config.name, config, versions(config))
    engine = InferenceService(supervisor, context, model)
    environments = EnvironmentServers(supervisor, config, engine.key)
    return EarlyServices(engine, environments, LearnerProcess(supervisor, context, engine.asleep))


def begin_beside_sources(config: RunConfig, early: EarlyServices) -> None:
    """Start what the warm-up needs while its model is made: Prefect's API, the learner; returns at once."""
    begin_prefect(config)
    early.learner.begin()

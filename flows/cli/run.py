"""Commands that start or resume runs: demo, run, sft, eval, resume and replay; how each starts its run."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from flows.cli.arguments import (
    DryRun,
    Index,
    Items,
    Name,
    Plain,
    RunItems,
    StoreOption,
    named_policy,
    one_run,
    option,
    split_items,
)
from flows.cli.output import print_report

if TYPE_CHECKING:
    from configs.run import RunConfig
    from flows.replays.request import ReplayRequest
    from flows.reporting.panel import Panel
    from flows.runtime.session import Session, Watcher


def demo(
    *items: Annotated[str, option("a PRESET that has a demo, and OVERRIDES; see below", "[PRESET] [OVERRIDES]")],
    name: Name = "",
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Run the demo of a preset and print its results; a second call resumes it. Raises UsageError, ConfigError."""
    from flows.cli.demo import demo_summary, train_demo
    from flows.runtime.demo_sources import demo_recipe

    presets, overrides = split_items(items)
    began = time.monotonic()
    try:
        config, outcome = train_demo(presets, overrides, name, store, partial(run_with_panel, plain=plain))
    except KeyboardInterrupt as error:  # the notes of its runs name one of two
        error.__notes__ = ["What is committed is safe; the same demo again goes on from there."]
        raise
    print("\n".join(demo_summary(outcome, config, demo_recipe(*presets), time.monotonic() - began)))
    return 0


def run(*items: Items, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int:
    """Train with reinforcement learning. Raises ConfigError, and what ends the run."""
    return start("train", *split_items(items), name=name, store=store, plain=plain)


def sft(*items: Items, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int:
    """Train on demonstrations. Raises ConfigError, and what ends the run."""
    return start("sft", *split_items(items), name=name, store=store, plain=plain)


def dpo(*items: Items, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int:
    """Learn preferences of recorded rollouts. Raises ConfigError, and what ends the run."""
    return start("dpo", *split_items(items), name=name, store=store, plain=plain)


def evaluate(
    *items: Items,
    policy: Annotated[
        str, option("RUN, RUN:VERSION or a policy's KEY; without it, the weights of model.path", "RUN:V")
    ] = "",
    url: Annotated[str, option("a chat API (https://host/v1) to evaluate instead of a policy")] = "",
    model: Annotated[str, option("name of the model at --url")] = "",
    retry_errors: Annotated[Index, option("sample rollouts that ended with an error again, up to N times", "N")] = 0,
    name: Name = "",
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Score a policy on held-out examples. Raises ConfigError, and what ends the run."""
    from flows.runtime.resolve_run import assignments

    files, overrides = split_items(items)
    # As overrides, so that they are checked, recorded and resumed like any other setting.
    options = {
        "policy": named_policy(store, policy),
        "external.url": url,
        "external.model": model,
        "retry_errors": retry_errors,
    }
    overrides += assignments({f"evaluation.{key}": value for key, value in options.items() if value})
    return start("evaluate", files, overrides, name=name, store=store, plain=plain)


def resume(*items: RunItems, store: StoreOption = "", plain: Plain = False) -> int:
    """Resume a run or a replay. Raises ConfigError for an unknown run, and what ends the run."""
    from flows.replays.request import ReplayRequest
    from flows.reporting.messages import outcome_message

    runs, overrides = split_items(items)
    request = run_to_resume(one_run(runs), overrides, store)
    if isinstance(request, ReplayRequest):
        return run_replay(request, plain)
    print(outcome_message(run_with_panel(request, plain=plain)))
    return 0


def replay(
    run: Annotated[str, option("the recorded run; it is not changed", "RUN")],
    /,
    *,
    from_stage: Annotated[
        str, option("first stage to repeat; without it, the first that reads a changed setting", "STAGE", name="--from")
    ] = "",
    until: Annotated[str, option("last stage to repeat; without it, training", "STAGE")] = "",
    steps: Annotated[str, option("which steps: 3:10 is 3 to 9; also 3: or :10 or one number", "A:B")] = "",
    overrides: Annotated[
        tuple[str, ...],
        option(
            "another setting, for example algorithm.type=rloo", "KEY=VALUE", name="--set", consume_multiple=(1, None)
        ),
    ] = (),
    name: Annotated[str, option("name of the new run; without it, the same replay always gets the same name")] = "",
    policies: Annotated[
        Literal["own", "recorded"] | None,
        option("own: each step starts from the policy made before; recorded: each step from the recorded policy"),
    ] = None,
    regrade: Annotated[bool, option("score the rollouts again with the reward functions as they are now")] = False,
    no_quarantine: Annotated[bool, option("keep quarantined rollouts")] = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Repeat recorded steps in a new run. Raises ConfigError, and what ends the run."""
    from flows.replays.request import ReplayRequest

    policy_source, quarantine = policies or "", not no_quarantine
    request = ReplayRequest(run, from_stage, until, steps, overrides, name, store, policy_source, regrade, quarantine)
    return run_replay(request, plain, dry_run)


def start(
    kind: str, files: Sequence[str], overrides: Sequence[str], name: str = "", store: str = "", plain: bool = False
) -> int:
    """Resolve a config, run the flow of `kind`, and print its results; return the exit status."""
    from flows.cli.demo import demo_model
    from flows.reporting.messages import outcome_message
    from flows.runtime.resolve_run import resolve_run

    runner = partial(run_with_panel, plain=plain)
    overrides = [*overrides, *demo_model(kind, files, overrides, store, runner)]
    config = resolve_run(kind, files, overrides, name=name, store=store)
    print(outcome_message(runner(config)))
    where = f"{config.name} --store {shlex.quote(config.store)}"
    print(f"run {config.name} is in {config.store}: stagecoach view --run {where}, or stagecoach show {where}")
    return 0


def run_replay(request: "ReplayRequest", plain: bool = False, dry_run: bool = False) -> int:
    """Run a replay, or with `dry_run` print how many results it would compute; return the exit status."""
    from flows.replays.config import prepare_replay
    from flows.replays.loop import summary

    config = prepare_replay(request)
    if dry_run:
        print_report(planned_results(config))
        return 0
    print("\n".join(summary(run_with_panel(config, plain=plain), config)))
    return 0


def planned_results(config: "RunConfig") -> dict[str, Counter[str]]:
    """Return how many results of each stage a run would find (`cached`), and how many it would make (`to_compute`)."""
    from flows.replays.loop import plan_run
    from flows.runtime.machine_facts import versions
    from flows.runtime.resolve_run import source_of
    from storage.store import open_store
    from tasks.runtime.run_context import RunContext

    results = plan_run(RunContext(open_store(config.store), config.name, config, versions(config)), source_of(config))
    return {
        "cached": Counter(result.stage for result in results if not result.computed),
        "to_compute": Counter(result.stage for result in results if result.computed),
    }


def run_to_resume(name: str, overrides: Sequence[str] = (), store: str = "") -> "RunConfig | ReplayRequest":
    """Return the config of a run of the store, `latest` for the newest, or the request of a replay.

    Raises ConfigError where the store has no run, or none of that name.
    """
    from configs.errors import ConfigError
    from configs.store import default_store
    from flows.replays.request import ReplayRequest
    from flows.runtime.resolve_run import nothing_started, resolve_run
    from storage.store import open_store

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


def run_with_panel(config: "RunConfig", plain: bool = False, watchers: tuple["Watcher", ...] = ()) -> dict[str, Any]:
    """Run a resolved config with a panel, of plain lines where `plain` says so; return its outcome."""
    with panel_for(config, plain) as panel:
        return run_config(config, (panel, *watchers))


def panel_for(config: "RunConfig", plain: bool = False) -> "Panel":
    """Return the panel of a run, which is live at once where it can be; `plain` asks for plain lines."""
    from flows.replays.loop import trains_again
    from flows.reporting.panel import Panel

    num_steps = 0 if config.kind == "evaluate" else config.steps
    # A replay that trains has the recorded rewards, or nearly so: what it changes is seen in the loss.
    measure = "loss" if config.from_data or trains_again(config) else "reward"
    title, first_step = f"{config.kind} {config.name}", config.replay.first_step
    return Panel(title, num_steps, plain=plain, measure=measure, first_step=first_step)


def run_config(config: "RunConfig", watchers: tuple["Watcher", ...] = ()) -> dict[str, Any]:
    """Run a resolved config: in a Prefect flow of its kind, or without Prefect where every result is cached."""
    from flows.replays.loop import plan_run
    from flows.runtime.run import open_run

    with open_run(config, plan_run, watchers) as session:
        if not session.missing:
            return run_loop(session)
        return run_in_flow(config, partial(run_loop, session), session.notify)


class _HeldWork:
    """The work of a flow. It stays in this process, while a flow travels with its tasks to other workers."""

    def __init__(self, work: Any = None) -> None:
        self.work = work

    def __reduce__(self) -> tuple[type["_HeldWork"], tuple[()]]:
        return _HeldWork, ()


def run_in_flow(config: "RunConfig", work: Callable[[], dict[str, Any]], notify: Callable[..., None]) -> dict[str, Any]:
    """Do the work of a run in a Prefect flow of its kind and return its outcome, also where Prefect loses it.

    Raises what `work` raises, PrefectFailed where Prefect failed before it began.
    """
    # Imported here and not above: Prefect takes a while, and reads which API to use when it is imported.
    import httpx
    from prefect import tags

    from flows.orchestration import server
    from flows.orchestration.run_flow import run_flow
    from flows.orchestration.table_workers import table_workers

    held, ends = _HeldWork(work), list[Any]()

    def flow(name: str, seed: int | None, store: str) -> dict[str, Any]:
        try:
            with table_workers(config.prefect):
                outcome: dict[str, Any] = held.work()
        except BaseException as error:
            ends.append(error)
            raise
        ends.append(outcome)
        return outcome

    try:
        with tags(*server.run_tags(config.name, config.store)), server.needed_heartbeats():
            call: Callable[..., dict[str, Any]] = run_flow(config.kind)(flow)
            returned = call(config.name, config.seed, config.store)
    except httpx.HTTPError as problem:
        if not ends:
            raise server.failure(problem) from problem
        if isinstance(ends[0], BaseException):
            raise ends[0] from problem
        text = f"Prefect did not get the end of the run, which is safe: {server.one_line(problem)}"
        notify("note", text=text)
        returned = ends[0]
    return returned


def run_loop(session: "Session") -> dict[str, Any]:
    """Do the steps of an open run by the loop of its kind, with its start and end recorded."""
    from flows.replays.loop import loop_replay
    from flows.runtime.loop import loop_evaluate, loop_train
    from flows.runtime.session import record_run

    loops = {
        "train": loop_train,
        "sft": loop_train,
        "dpo": loop_train,
        "evaluate": loop_evaluate,
        "replay": loop_replay,
    }
    with record_run(session):
        return loops[session.config.kind](session)

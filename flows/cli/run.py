"""Commands that start or resume runs: demo, run, sft, eval, resume and replay."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from flows.cli.arguments import (
    DryRun,
    Index,
    Items,
    Name,
    Plain,
    RunItems,
    StoreOption,
    one_run,
    option,
    split_items,
)
from flows.cli.output import print_report

if TYPE_CHECKING:
    from configs.run import RunConfig
    from flows.replays.request import ReplayRequest


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
        config, outcome = train_demo(presets, overrides, name, store, plain)
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


def evaluate(
    *items: Items,
    policy: Annotated[str, option("RUN or RUN:VERSION; without it, the weights of model.path")] = "",
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
    options = {"policy": policy, "external.url": url, "external.model": model, "retry_errors": retry_errors}
    overrides += assignments({f"evaluation.{key}": value for key, value in options.items() if value})
    return start("evaluate", files, overrides, name=name, store=store, plain=plain)


def resume(*items: RunItems, store: StoreOption = "", plain: Plain = False) -> int:
    """Resume a run or a replay. Raises ConfigError for an unknown run, and what ends the run."""
    from flows.cli.launch import run_to_resume, watch
    from flows.replays.request import ReplayRequest
    from flows.reporting.messages import outcome_message

    runs, overrides = split_items(items)
    request = run_to_resume(one_run(runs), overrides, store)
    if isinstance(request, ReplayRequest):
        return run_replay(request, plain)
    print(outcome_message(watch(request, plain=plain)))
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
    from flows.cli.launch import watch
    from flows.reporting.messages import outcome_message
    from flows.runtime.resolve_run import resolve_run

    overrides = [*overrides, *demo_model(kind, files, overrides, store, plain)]
    config = resolve_run(kind, files, overrides, name=name, store=store)
    print(outcome_message(watch(config, plain=plain)))
    where = f"{config.name} --store {config.store}"
    print(f"run {config.name} is in {config.store}: stagecoach view --run {where}, or stagecoach show {where}")
    return 0


def run_replay(request: "ReplayRequest", plain: bool = False, dry_run: bool = False) -> int:
    """Run a replay, or with `dry_run` print how many results it would compute; return the exit status."""
    from flows.cli.launch import watch
    from flows.replays.config import prepare_replay
    from flows.replays.loop import summary

    config = prepare_replay(request)
    if dry_run:
        print_report(planned_results(config))
        return 0
    print("\n".join(summary(watch(config, plain=plain), config)))
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

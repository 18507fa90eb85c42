"""Commands that start or resume runs: demo, run, sft, eval, resume and replay."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Token

from flows.cli.arguments import (
    Index,
    Items,
    Name,
    Plain,
    RunItems,
    StoreOption,
    UsageError,
    one_run,
    option,
    split_items,
)
from flows.reporting.formats import before_after, console

if TYPE_CHECKING:
    from flows.replays.request import ReplayRequest


def demo(
    *items: Annotated[str, option("a PRESET that has a demo, and OVERRIDES; see below", "[PRESET] [OVERRIDES]")],
    name: Name = "",
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Run the demo of a preset and print its results; a second call resumes it. Raises UsageError, ConfigError."""
    from configs.errors import did_you_mean
    from flows.cli.demo import demo_summary, train_demo
    from flows.runtime.demo_sources import FIRST, demo_presets, demo_recipe

    presets, overrides = split_items(items)
    with_demo = demo_presets()
    if len(presets) > 1 or not set(presets) <= set(with_demo):
        near, names = did_you_mean(presets[0], with_demo), ", ".join(with_demo)
        raise UsageError(f"demo takes one of {names}, not {' '.join(presets)}; `stagecoach run` takes files{near}")
    preset, began = (*presets, FIRST)[0], time.monotonic()
    try:
        config, outcome = train_demo(preset, overrides, name, store, plain)
    except KeyboardInterrupt as error:  # the notes of its runs name one of two
        error.__notes__ = ["What is committed is safe; the same demo again goes on from there."]
        raise
    print("\n".join(demo_summary(outcome, config, demo_recipe(preset), time.monotonic() - began)))
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


def resume(*items: RunItems, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int:
    """Resume a run or a replay. Raises ConfigError for an unknown run, and what ends the run."""
    from flows.cli.launch import run_to_resume, watch
    from flows.replays.request import ReplayRequest

    runs, overrides = split_items(items)
    request = run_to_resume(one_run([name, *runs]), overrides, store)
    if isinstance(request, ReplayRequest):
        return run_replays([request], plain)
    _print_comparisons(watch(request, plain=plain))
    return 0


def _values_of_each(_: object, tokens: Sequence[Token]) -> list[list[str]]:
    """Return the values of an option, a list for each time that it was given: a first value has the index 0."""
    # cyclopts would join them to one list, and `--vary a=1 b=2 --vary a=3` would be one replay.
    starts = [place for place, token in enumerate(tokens) if token.index == 0]
    values = [token.value for token in tokens]
    return [values[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


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
    vary: Annotated[
        Sequence[Sequence[str]],
        option(
            "one replay for each --vary, with these settings and those of --set",
            "KEY=VALUE",
            converter=_values_of_each,
            n_tokens=1,
            consume_multiple=(1, None),
        ),
    ] = (),
    name: Annotated[str, option("name of the new run; without it, the same replay always gets the same name")] = "",
    policies: Annotated[
        Literal["own", "recorded"] | None,
        option("own: each step starts from the policy made before; recorded: each step from the recorded policy"),
    ] = None,
    regrade: Annotated[bool, option("score the rollouts again with the reward functions as they are now")] = False,
    no_quarantine: Annotated[bool, option("keep quarantined rollouts")] = False,
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Repeat recorded steps in new runs, one for each `vary`. Raises ConfigError, and what ends a run."""
    from flows.replays.request import ReplayRequest

    if name and len(vary) > 1:
        raise UsageError("--name is for one replay; several (--vary) name themselves")
    requests = [
        ReplayRequest(
            run=run,
            from_stage=from_stage,
            until=until,
            steps=steps,
            overrides=[*overrides, *settings],
            name=name,
            store=store,
            policies=policies or "",
            regrade=regrade,
            quarantine=not no_quarantine,
        )
        for settings in vary or [()]
    ]
    return run_replays(requests, plain)


def start(
    kind: str, files: Sequence[str], overrides: Sequence[str], name: str = "", store: str = "", plain: bool = False
) -> int:
    """Resolve a config, run the flow of `kind`, and print its results; return the exit status."""
    from flows.cli.demo import demo_model
    from flows.cli.launch import watch
    from flows.reporting.messages import result_lines
    from flows.runtime.resolve_run import resolve_run

    overrides = [*overrides, *demo_model(kind, files, overrides, store, plain)]
    config = resolve_run(kind, files, overrides, name=name, store=store)
    outcome = watch(config, plain=plain)
    for line in result_lines(outcome.get("steps", ())):
        print(line)
    _print_comparisons(outcome)
    where = f"{config.name} --store {config.store}"
    print(f"run {config.name} is in {config.store}; look at it with: stagecoach view --run {where}")
    print(f"or on this terminal: stagecoach show {where}")
    return 0


def run_replays(requests: "Sequence[ReplayRequest]", plain: bool = False) -> int:
    """Run replays sequentially, all checked before the first begins; return the exit status."""
    from flows.cli.launch import watch
    from flows.replays.config import prepare_replay
    from flows.replays.loop import summary
    from flows.replays.request import finished_message, finished_without_source

    ended = [finished_without_source(request) for request in requests]
    configs = [prepare_replay(request) for request, done in zip(requests, ended, strict=True) if done is None]
    for done in filter(None, ended):
        print(finished_message(done))
    for config in configs:
        outcome = watch(config, plain=plain)
        print("\n".join(summary(outcome, config)))
    return 0


def _print_comparisons(outcome: dict[str, Any]) -> None:
    if outcome.get("comparisons"):
        console().print(before_after(outcome["comparisons"]))

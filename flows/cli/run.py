"""Commands that start or resume runs: demo, run, sft, eval, resume, replay; and deploy."""

from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import Token

from flows.cli.arguments import (
    Count,
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


def demo(
    *items: Annotated[str, option("a PRESET that has a demo, and OVERRIDES; see below", "[PRESET] [OVERRIDES]")],
    name: Name = "",
    store: StoreOption = "",
    plain: Plain = False,
) -> int | None:
    """Train a small model from nothing to good, on this machine."""
    from configs.errors import did_you_mean
    from flows.cli.launch import demo
    from flows.runtime.demo_sources import FIRST, RECIPES

    # Only presets with a recipe: the demo makes the model and the demonstrations that the preset is for.
    presets, overrides = split_items(items)
    if len(presets) > 1 or not set(presets) <= set(RECIPES):
        known = ", ".join(RECIPES)
        near = did_you_mean(presets[0], RECIPES)
        raise UsageError(f"demo takes one of {known}, not {' '.join(presets)}; `stagecoach run` takes files{near}")
    return demo(next(iter(presets), FIRST), overrides=overrides, name=name, store=store, plain=plain)


def run(*items: Items, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int | None:
    """Train with reinforcement learning; the same name resumes the run."""
    from flows.cli.launch import start

    return start("train", *split_items(items), name=name, store=store, plain=plain)


def sft(*items: Items, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int | None:
    """Train on demonstrations (supervised)."""
    from flows.cli.launch import start

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
) -> int | None:
    """Score a policy on held-out examples."""
    from flows.cli.launch import start
    from flows.runtime.prepare import assignments

    files, overrides = split_items(items)
    # As overrides, so that they are checked, recorded and resumed like any other setting.
    given = {"policy": policy, "external.url": url, "external.model": model, "retry_errors": retry_errors}
    overrides += assignments({f"evaluation.{key}": value for key, value in given.items() if value})
    return start("evaluate", files, overrides, name=name, store=store, plain=plain)


def resume(*items: RunItems, name: Name = "", store: StoreOption = "", plain: Plain = False) -> int | None:
    """Resume a run: finished work is cached, the rest is computed."""
    from flows.cli.launch import resume

    runs, overrides = split_items(items)
    return resume(one_run([name, *runs]), overrides=overrides, store=store, plain=plain)


def _values_of_each(_: object, tokens: Sequence[Token]) -> list[list[str]]:
    """Return the values of an option, a list for each time that it was given: a first value has the index 0."""
    # cyclopts would join them to one list, and `--vary a=1 b=2 --vary a=3` would be one replay.
    several: list[list[str]] = []
    for token in tokens:
        if token.index == 0:
            several.append([])
        several[-1].append(token.value)
    return several


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
) -> int | None:
    """Do recorded steps again in a new run, from one stage on."""
    from flows.cli.launch import replays
    from flows.replays.request import ReplayRequest

    if name and len(vary) > 1:
        raise UsageError("--name is for one replay; several (--vary) name themselves")
    requests = [
        ReplayRequest(
            run=run,
            from_stage=from_stage,
            until=until,
            steps=steps,
            overrides=[*overrides, *own],
            name=name,
            store=store,
            policies=policies or "",
            regrade=regrade,
            quarantine=not no_quarantine,
        )
        for own in vary or [()]
    ]
    return replays(requests, plain=plain)


def deploy(
    *,
    pool: Annotated[str, option("work pool; one for each machine or kind of machine")] = "stagecoach",
    slots: Annotated[Count, option("how many runs with an engine or a learner may run at the same time")] = 1,
    file: Annotated[
        str, option("another file of deployments than the one of the program, flows/orchestration/prefect.yaml")
    ] = "",
    notify: Annotated[
        str,
        option(
            "notification block, such as slack-webhook/ops, that gets messages: evaluations, "
            "gates that wait, rewards that fall, ends of runs"
        ),
    ] = "",
    store: StoreOption = "",
) -> int | None:
    """Put deployments, work pool and automations on the Prefect server."""
    from flows.orchestration.deployments import main

    return main(pool=pool, store=store, slots=slots, file=file, notify=notify)

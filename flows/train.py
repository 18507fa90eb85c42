"""Train: reinforcement learning, step by step, through the six stages."""

from collections.abc import Sequence
from typing import Any

from flows.orchestration.run_flow import run_flow
from flows.runtime.demo_sources import demo_weights
from flows.runtime.entry import FileParameters, continued_settings, session_for
from flows.runtime.loop import loop_train
from flows.runtime.resolve_run import nothing_started, requested_config
from flows.sft import sft


@run_flow("train")
def train(
    name: str = "",
    presets: Sequence[str] = (),
    model: str = "",
    steps: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    continue_run: str = "",
    advanced: FileParameters | None = None,
) -> dict[str, Any]:
    """Train a policy with reinforcement learning; calling it again with the same name goes on where it stopped.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        presets: presets such as demo or qwen3_gpu, later ones over earlier ones.
        model: weights to start from: a directory or hub id; `demo` makes a small model and warms it up first.
        steps: steps to make; None leaves it to the presets. With continue_run, the number of further steps.
        seed: seed of the run: the same config and seed compute nothing twice; None draws one.
        overrides: dotted settings such as training.learning_rate=1e-5.
        continue_run: name of a recorded run to train further by `steps`, under its own config; `latest` for the newest.
        advanced: what is rarely set: files of settings, and another store.
    """
    rare = FileParameters.of(advanced)
    layers = [*presets, *rare.files]
    given: dict[str, Any] = {"name": name, "store": rare.store, "seed": seed, "steps": steps, "model.path": model}
    if continue_run:
        given = continued_settings("train", continue_run, layers, given)
    if layers or model:
        with nothing_started():  # before the demo's model is made, which takes minutes
            requested = requested_config("train", layers, overrides, given)
        # Nobody asks for the result of the warm-up, and nobody would clean it up.
        given["model.path"] = demo_weights(requested, sft.with_options(persist_result=False)) or model
    with session_for("train", layers, overrides, **given) as session:
        return loop_train(session)

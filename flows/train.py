"""Train: reinforcement learning, step by step, through the six stages."""

from collections.abc import Sequence
from typing import Any

from prefect import flow

from configs.load import load
from flows.orchestration.states import OF_A_RUN, needs_api, reports_its_end
from flows.runtime.demo_sources import demo_weights, weights_of
from flows.runtime.entry import FileParameters, flow_run_name, instead, session_for
from flows.runtime.loops import loop_train
from flows.sft import sft


@needs_api
@flow(name="train", flow_run_name=flow_run_name("train"), **OF_A_RUN)
@reports_its_end
def train(
    name: str = "",
    presets: Sequence[str] = (),
    environment: str = "",
    model: str = "",
    steps: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    advanced: FileParameters | None = None,
) -> dict[str, Any]:
    """Train a policy with reinforcement learning; calling it again with the same name goes on where it stopped.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        presets: presets such as demo or qwen3_gpu, later ones over earlier ones.
        environment: id of an installed taskset, in place of the environments of presets and files.
        model: weights to start from: a directory or hub id; `demo` makes a small model and warms it up first.
        steps: steps to make; None leaves it to the presets.
        seed: seed of the run: the same config and seed compute nothing twice; None draws one.
        overrides: dotted settings such as training.learning_rate=1e-5.
        advanced: what is rarely set: files of settings, and another store.
    """
    rare = FileParameters.of(advanced)
    store, layers, overrides = rare.store, [*presets, *rare.files], [*instead(environment), *overrides]
    weights = weights_of(model, store, sft)
    if layers and not model:  # a file may say `demo` as well
        place = [f"store={store}"] if store else []
        overrides = [*overrides, *demo_weights(load(layers, [*overrides, *place]), sft)]
    given = {"name": name, "store": store, "seed": seed, "steps": steps, "model.path": weights}
    with session_for("train", layers, overrides, **given) as session:
        return loop_train(session)

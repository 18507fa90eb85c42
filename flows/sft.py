"""SFT: supervised warm start on demonstrations, with the packing, the learner and the tables of training."""

from collections.abc import Sequence
from typing import Any

from flows.orchestration.run_flow import run_flow
from flows.runtime.entry import FileParameters, continued_settings, session_for
from flows.runtime.loop import loop_train


@run_flow("sft")
def sft(
    name: str = "",
    presets: Sequence[str] = (),
    model: str = "",
    data: str = "",
    steps: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    continue_run: str = "",
    advanced: FileParameters | None = None,
) -> dict[str, Any]:
    """Train a policy on demonstrations; calling it again with the same name goes on where it stopped.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        presets: presets such as sft_demo, later ones over earlier ones.
        model: weights to start from: a directory or hub id.
        data: JSONL or Parquet file of demonstrations on the worker.
        steps: steps to make, each of packing.updates_per_step optimizer steps; None leaves it to the presets.
            With continue_run, the number of further steps.
        seed: seed of the run: the same config and seed compute nothing twice; None draws one.
        overrides: dotted settings such as training.learning_rate=1e-4.
        continue_run: name of a recorded run to train further by `steps`, under its own config; `latest` for the newest.
        advanced: what is rarely set: files of settings, and another store.
    """
    rare = FileParameters.of(advanced)
    layers = [*presets, *rare.files]
    named = {"name": name, "store": rare.store, "model.path": model, "data.path": data}
    given: dict[str, Any] = {**named, "seed": seed, "steps": steps}
    if continue_run:
        given = continued_settings("sft", continue_run, layers, given)
    with session_for("sft", layers, overrides, **given) as session:
        return loop_train(session)

"""DPO: preferences of recorded rollouts, with the packing, the learner and the tables of training."""

from collections.abc import Sequence
from typing import Any

from flows.orchestration.run_flow import run_flow
from flows.runtime.entry import FileParameters, session_for
from flows.runtime.loop import loop_train


@run_flow("dpo")
def dpo(
    name: str = "",
    presets: Sequence[str] = (),
    runs: Sequence[str] = (),
    model: str = "",
    steps: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    advanced: FileParameters | None = None,
) -> dict[str, Any]:
    """Train a policy on the preferences of recorded rollouts; called again with the same name, a run goes on.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        presets: presets such as dpo_demo, later ones over earlier ones.
        runs: runs of the store whose rollouts are compared; none leaves it to the presets.
        model: weights to start from: a directory or hub id; empty takes those that the first run began with.
        steps: steps to make, each of packing.updates_per_step optimizer steps; None leaves it to the presets.
        seed: seed of the run: the same config and seed compute nothing twice; None draws one.
        overrides: dotted settings such as training.loss.type=kto.
        advanced: what is rarely set: files of settings, and another store.
    """
    rare = FileParameters.of(advanced)
    given = {"name": name, "store": rare.store, "model.path": model, "data.runs": [*runs] or None}
    with session_for("dpo", [*presets, *rare.files], overrides, **given, seed=seed, steps=steps) as session:
        return loop_train(session)

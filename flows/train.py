"""Train: reinforcement learning, step by step, through the six stages."""

from typing import Any

from prefect import flow

from flows.cancellation import cancellable
from flows.session import session_for
from flows.walks import walk_train


@flow(name="train", flow_run_name="train-{name}", persist_result=False, validate_parameters=False)
@cancellable
def train(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Train a policy with reinforcement learning; calling it again with the same name goes on where it stopped.

    Args:
        files: presets or TOML files, from left to right.
        overrides: dotted settings such as training.learning_rate=1e-5.
        name: name of the run; a run of that name is resumed.
        store: root of the store.
        seed: seed of the run; the same config and seed compute nothing twice.
        steps: steps to make.
    """
    with session_for("train", files, overrides, name=name, store=store, seed=seed, steps=steps) as session:
        return walk_train(session)

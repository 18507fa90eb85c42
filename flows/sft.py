"""SFT: supervised warm start on demonstrations, with the packing, the learner and the tables of training."""

from typing import Any

from prefect import flow

from flows.cancellation import cancellable
from flows.session import session_for
from flows.walks import walk_sft


@flow(name="sft", flow_run_name="sft-{name}", persist_result=False, validate_parameters=False)
@cancellable
def sft(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Train a policy on demonstrations; calling it again with the same name goes on where it stopped.

    Args:
        files: presets or TOML files, from left to right.
        overrides: dotted settings such as data.path=demonstrations.jsonl.
        name: name of the run; a run of that name is resumed.
        store: root of the store.
        seed: seed of the run; the same config and seed compute nothing twice.
        steps: steps to make, each of packing.updates_per_step optimizer steps.
    """
    with session_for("sft", files, overrides, name=name, store=store, seed=seed, steps=steps) as session:
        return walk_sft(session)

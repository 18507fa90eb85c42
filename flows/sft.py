"""SFT: supervised warm start on demonstrations, with the packing, the learner and the tables of training."""

from prefect import flow

from flows import pipeline
from flows.cancellation import cancellable
from flows.doing import Worker
from flows.outcome import Outcome, finish_step
from flows.session import Session, session_for


@flow(name="sft", flow_run_name="sft-{name}", persist_result=False, validate_parameters=False)
@cancellable
def sft(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    steps: int | None = None,
) -> dict:
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
        return run(session).to_json()


def run(session: Session) -> Outcome:
    """Walk the supervised pipeline of `session` and return what came of it."""
    outcome = Outcome(session.place.run, session.config.steps)
    do = Worker(session)
    for step, drawn, trained, policy in pipeline.run_steps(do, session.source, session.config):
        outcome.add(finish_step(session, step, drawn, trained))
        outcome.policy = policy
    outcome.num_computed, outcome.num_found = do.num_computed, do.num_found
    return outcome

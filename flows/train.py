"""Train: reinforcement learning, step by step, through the six stages."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from prefect import flow

from flows import evaluate, pipeline
from flows.cancellation import cancellable
from flows.doing import Worker
from flows.outcome import Outcome, check_account, finish_step
from flows.pipeline import Ahead, Drawn
from flows.session import Session, session_for
from tasks.stage import Policy


@flow(name="train", flow_run_name="train-{name}", persist_result=False, validate_parameters=False)
@cancellable
def train(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    steps: int | None = None,
) -> dict:
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
        return run(session).to_json()


def run(session: Session) -> Outcome:
    """Walk the pipeline of `session` and return what came of it."""
    config = session.config
    outcome = Outcome(session.place.run, config.steps)
    do = Worker(session)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead") as threads:
        walk = pipeline.run_steps(
            do, session.source, config, in_thread(threads), lambda drawn: check_account(session, drawn)
        )
        if config.evaluation.every:
            outcome.evaluations.append(evaluate_now(session, pipeline.first_policy(do, session.source)))
        for step, drawn, trained, policy in walk:
            outcome.add(finish_step(session, step, drawn, trained))
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                outcome.evaluations.append(evaluate_now(session, policy))
            outcome.policy = policy
    outcome.num_computed, outcome.num_found = do.num_computed, do.num_found
    return outcome


def evaluate_now(session: Session, policy: Policy) -> dict[str, Any]:
    """Score `policy` on held-out examples and tell the watchers."""
    found = {"version": policy.version, "scores": evaluate.scores(session, policy)}
    session.tell("evaluation", **found)
    return found


def in_thread(threads: ThreadPoolExecutor) -> Ahead:
    """Return a way to draw ahead in a thread that knows the current flow run."""

    def ahead(drawing: Callable[[], Drawn]) -> Callable[[], Drawn]:
        return threads.submit(copy_context().run, drawing).result

    return ahead

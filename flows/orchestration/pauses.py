"""Pauses: a flow run waits in Prefect for a person's answer, while its process and services stay as they are.

Prefect's own way of pausing asks every ten seconds and does not see that a run is cancelled meanwhile, so the waiting
is done here. The states, the form and the answer are Prefect's: its page has a form, its API and ours answer too.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flows.orchestration.cancellation import RunCancelled
from tasks.gate import Answer, Question

ASK_SECONDS = 2.0
PREFECT_SECONDS = 600
"""Prefect waits so much longer than we do: once its own time is over, it takes no other end of the run than its own."""
_log = logging.getLogger("stagecoach")


class Unanswered(ValueError):
    """Nobody said whether a batch may be trained on."""


@dataclass(frozen=True)
class Paused:
    """The run that waits."""

    run: str
    store: str

    @property
    def resume(self) -> str:
        """The command that goes on with it."""
        return f"stagecoach resume {self.run} --store {self.store}"


def told(page: str, key: str, description: str) -> None:
    """Show a page as an artifact of the flow run around; a Prefect that fails is only told of."""
    import httpx
    from prefect.artifacts import create_markdown_artifact

    try:
        create_markdown_artifact(page, key=key, description=description)
    except httpx.HTTPError as problem:
        _log.warning("the summary of the batch is not shown in Prefect: %s", problem)


def wait_for_answer(
    paused: Paused, question: Question, page: str, clock: Callable[[], float] = time.monotonic
) -> Answer:
    """Pause the flow run around, with a form under `page`, and return what a person answers.

    The pause carries the question's key: what was answered before a process died is taken by the same flow run when it
    is tried again. Raises Unanswered after `question.timeout_seconds` or where the run cannot wait, RunCancelled.
    """
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    if not flow_run.id:
        raise Unanswered(_advice(paused, question, "there is no flow run in which a person could be asked"))
    form = approval_form(page)
    deadline = clock() + question.timeout_seconds
    with get_client(sync_client=True) as client:
        state, keyset = _pause(client, flow_run.id, question)
        if state.is_paused():
            form.save(keyset)
        while state.is_paused() and clock() < deadline:
            time.sleep(min(ASK_SECONDS, question.timeout_seconds))
            state = _state(client, flow_run.id) or state
    if state.is_running():
        given = form.load(keyset)
        return Answer(given.approve, given.by, given.reason)
    raise _ended(paused, question, state)


def approval_form(page: str) -> Any:
    """Return the form that Prefect shows: a subclass of its RunInput, with the page above it."""
    from prefect.input import RunInput
    from pydantic import Field

    class Approval(RunInput):
        approve: bool = Field(description="on: the batch is trained on; off: the run stops here and can be resumed")
        by: str = Field(min_length=1, description="your name; it stands in the decision")
        reason: str = Field("", description="why; it stands in the decision")

    return Approval.with_initial_data(description=page)


def _pause(client: Any, flow_run_id: Any, question: Question) -> tuple[Any, Any]:
    """Bring the flow run into the paused state; return the state it is in then, and under which keys input comes."""
    from prefect import states
    from prefect.input import keyset_from_paused_state
    from prefect.utilities.engine import propose_state_sync

    seconds = math.ceil(question.timeout_seconds) + PREFECT_SECONDS
    wanted = states.Paused(timeout_seconds=seconds, reschedule=False, pause_key=question.key)
    keyset = keyset_from_paused_state(wanted)
    wanted.state_details.run_input_keyset = keyset
    return propose_state_sync(client, wanted, flow_run_id=flow_run_id), keyset


def _state(client: Any, flow_run_id: Any) -> Any:
    """Return the flow run's state; None while the API does not answer, which ends no wait."""
    import httpx

    try:
        return client.read_flow_run(flow_run_id).state
    except httpx.HTTPError:
        return None


def _ended(paused: Paused, question: Question, state: Any) -> ValueError:
    if state.is_cancelling() or state.is_cancelled():
        return RunCancelled(
            f"cancelled while step {question.step} waited for approval. Everything done so far is safe in "
            f"{paused.store}; go on with: {paused.resume}"
        )
    waited = f"nobody answered within gate.timeout_seconds, {question.timeout_seconds:g}"
    return Unanswered(_advice(paused, question, waited if state.is_paused() else f"the flow run is {state.name}"))


def _advice(paused: Paused, question: Question, what: str) -> str:
    return (
        f"step {question.step} waits for approval and {what}. Nothing was trained on its batch; the batch and all "
        f"before it are safe. To be asked again: {paused.resume}; to go on without asking: {paused.resume} "
        f"gate.type=none"
    )

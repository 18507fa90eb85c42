"""Gates that a person answers: what is shown of a batch, and the flow run that waits for the answer."""

import math
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from flows.orchestration.server import api_client, bookkeeping_only
from flows.orchestration.states import RunCancelled, cancelled_text, resume_command
from flows.reporting.artifacts import artifact_key, escape
from flows.reporting.formats import compact_number, cut, visible
from tasks.metrics.figures import MEANINGS
from tasks.runtime.services import Answer, Approve, Question, Shown

ASK_SECONDS = 2.0
PREFECT_SECONDS = 600
"""Prefect waits so much longer than we do: once its own time is over, it takes no other end of the run than its own."""
LONGEST_TEXT = 1500
"""Characters of a message that are shown."""


class Unanswered(ValueError):
    """Nobody said whether a batch may be trained on."""


def approval(run: str, store: str, notify: Callable[..., None]) -> Approve:
    """Return a function that asks a person about a batch of `run` through the Prefect flow run around it.

    `notify` shows the listeners of the run how to answer.
    """

    def ask(question: Question) -> Answer:
        from prefect.artifacts import create_markdown_artifact

        page = summary(run, question)
        title = f"Step {question.step} of run {escape(run)} waits for approval of {question.about}"
        with bookkeeping_only("the summary of the batch"):
            create_markdown_artifact(page, key=artifact_key("gate", run), description=title)
        command = f"stagecoach gate {run} --approve (or --refuse) --store {shlex.quote(store)}"
        text = f"step {question.step} waits for approval of {question.about}: {command}"
        notify("note", text=text)
        notify("gate", step=question.step, text=text)
        return wait_for_answer(run, store, question, page)

    return ask


def wait_for_answer(run: str, store: str, question: Question, page: str) -> Answer:
    """Pause the flow run around `run`, with a form under `page`, and return what a person answers.

    The pause carries the question's key: what was answered before a process died is taken by the same flow run when it
    is tried again. Raises Unanswered after `question.timeout_seconds` or where the run cannot wait, RunCancelled.
    """
    import httpx
    from prefect.input import keyset_from_paused_state
    from prefect.runtime import flow_run
    from prefect.states import Paused
    from prefect.utilities.engine import propose_state_sync

    resume = resume_command(run, store)
    if not flow_run.id:
        raise Unanswered(_advice(resume, question, "there is no flow run in which a person could be asked"))
    form = approval_form(page)
    # Before the pause: proposing it may take a while itself.
    deadline = time.monotonic() + question.timeout_seconds
    with api_client() as client:
        seconds = math.ceil(question.timeout_seconds) + PREFECT_SECONDS
        # Not rescheduled: this process waits, with its engine up, and goes on itself.
        state: Any = Paused(timeout_seconds=seconds, reschedule=False, pause_key=question.key)
        keyset = state.state_details.run_input_keyset = keyset_from_paused_state(state)
        # Before the pause: whoever sees the flow run paused may answer immediately, and needs the form for it.
        save_form(form, keyset)
        state = propose_state_sync(client, state, flow_run_id=flow_run.id)
        while state.is_paused() and time.monotonic() < deadline:
            time.sleep(min(ASK_SECONDS, question.timeout_seconds))
            # In hours of waiting a server is restarted now and then, which ends no wait.
            with suppress(httpx.HTTPError):
                state = client.read_flow_run(flow_run.id).state or state
    if state.is_running():
        reply = form.load(keyset)
        return Answer(reply.approve, reply.by, reply.reason)
    if state.is_cancelling() or state.is_cancelled():
        raise RunCancelled(cancelled_text(f"while step {question.step} waited for approval", run, store))
    waited = f"nobody answered within gate.timeout_seconds, {question.timeout_seconds:g}"
    raise Unanswered(_advice(resume, question, waited if state.is_paused() else f"the flow run is {state.name}"))


def approval_form(page: str) -> Any:
    """Return the form that Prefect shows: a subclass of its RunInput, with the page above it."""
    from prefect.input import RunInput
    from pydantic import Field

    # Made here: its base is Prefect's, which may not be imported before a flow runs.
    class Approval(RunInput):
        approve: bool = Field(description="on: the run goes on; off: it stops here and can be resumed")
        by: str = Field(min_length=1, description="your name; it stands in the decision")
        reason: str = Field("", description="why; it stands in the decision")

    return Approval.with_initial_data(description=page)


def save_form(form: Any, keyset: Any) -> None:
    """Keep the form of an answer with the flow run; one that has it from an earlier try keeps that one.

    Raises PrefectHTTPStatusError where Prefect does not take it for another reason.
    """
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        form.save(keyset)
    except PrefectHTTPStatusError as problem:
        if problem.response.status_code != HTTPStatus.CONFLICT:
            raise


def _advice(resume: str, question: Question, what: str) -> str:
    return (
        f"step {question.step} waits for approval of {question.about} and {what}. Nothing was trained on its batch; "
        f"the batch and all before it are safe. To be asked again: {resume}; to go on without asking: {resume} "
        f"{question.without}"
    )


def summary(run: str, question: Question) -> str:
    """Return a batch as markdown: its figures with their meanings, then a few rollouts with their texts."""
    figures = [
        f"| {escape(name)} | {compact_number(value)} | {escape(MEANINGS.get(name) or name)} |"
        for name, value in question.figures.items()
    ]
    head = [f"# {escape(run)}, step {question.step}: may this batch be trained on?", ""]
    head += ["| figure | value | what it is |", "|---|---:|---|", *figures]
    return "\n".join([*head, *(line for shown in question.rollouts for line in _rollout(shown))])


def _rollout(shown: Shown) -> list[str]:
    lines = ["", f"## {shown.label}: reward {compact_number(shown.reward)} ({escape(shown.trace_id)})"]
    for role, text in shown.messages:
        head, more = cut(text, LONGEST_TEXT)
        begun = visible(head) + (f" ... ({more} more)" if more else "")
        # An indented block shows a model's text as it is, whatever marks it holds.
        lines += ["", f"{escape(role)}:", "", *(f"    {line}" for line in begun.split("\n"))]
    return lines

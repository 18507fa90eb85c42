"""How a run ends, in the store's events and in Prefect's words."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.states import Cancelling

from configs.errors import ConfigError
from flows.orchestration import server, states
from flows.orchestration.states import EmptyBatch, GateRefused, RunCancelled, event_of, reports_its_end, tagged
from storage.errors import StoreUnavailable
from tasks.runtime.prefect_task import error_text, is_transient


def noted(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return error


def ending(error: Exception) -> Any:
    @reports_its_end
    def flow() -> object:
        raise error

    return flow()


def test_a_cancelled_flow_ends_as_cancelled() -> None:
    cancelled = RunCancelled("cancelled before stage packing")
    state = ending(cancelled)
    assert (state.type.value, state.message) == ("CANCELLED", str(cancelled))
    with pytest.raises(RunCancelled):
        state.result()


@pytest.mark.parametrize("error", [ConfigError(["steps: 0 is too few"]), KeyError("x")])
def test_a_failed_flow_says_its_notes_and_whoever_calls_it_gets_the_error(error: Exception) -> None:
    state = ending(noted(error, "Nothing was started.", "Correct it."))
    told = f"{type(error).__name__}: {error}\nNothing was started.\nCorrect it."
    assert (state.type.value, state.message) == ("FAILED", told)
    with pytest.raises(type(error)):
        state.result()


def test_what_a_flow_returns_is_its_own() -> None:
    flow: Callable[[], int] = reports_its_end(lambda: 7)
    assert flow() == 7


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (EmptyBatch("nothing"), ("evicted", "nothing")),
        (RunCancelled("asked to"), ("cancelled", "asked to")),
        (GateRefused("no"), ("refused", "no")),
        (noted(ValueError("broken"), "All is safe."), ("failed", "ValueError: broken\nAll is safe.")),
        (KeyboardInterrupt(), ("failed", "KeyboardInterrupt: ")),
    ],
)
def test_the_event_of_an_error(error: BaseException, event: tuple[str, str]) -> None:
    assert event_of(error) == event


def test_a_run_that_was_cancelled_is_not_called_failed_because_the_api_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TerminationSignal(BaseException):
        """Called as Prefect calls it."""

    answers: list[Any] = [httpx.ReadTimeout("busy"), httpx.ReadTimeout("busy"), SimpleNamespace(state=Cancelling())]

    def read_flow_run(_: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = nullcontext(SimpleNamespace(read_flow_run=read_flow_run))
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda sync_client: client)
    monkeypatch.setattr(server, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(states, "current_flow_run", lambda: "its id")
    assert event_of(TerminationSignal())[0] == "cancelled"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError("engine"), True),
        (TimeoutError("slow"), True),
        (StoreUnavailable("no answer"), True),
        (ConfigError(["steps"]), False),
        (ValueError("rows"), False),
        (OSError("disk"), False),
    ],
)
def test_only_what_may_pass_is_called_again(error: Exception, again: bool) -> None:
    """Prefect hands over the error itself where it was raised, and the returned state where one was returned."""
    returned = SimpleNamespace(data=error, message=error_text(error))
    assert is_transient(None, None, SimpleNamespace(data=error)) is again
    assert is_transient(None, None, SimpleNamespace(data=returned)) is again


@pytest.mark.parametrize(
    ("tags", "found"),
    [(["stagecoach", "run:a", "run-b"], "a"), (["store:s3://b/c"], ""), ([], ""), (["run:a:b"], "a:b")],
)
def test_what_a_tag_says(tags: Iterable[str], found: str) -> None:
    assert tagged(tags, "run") == found

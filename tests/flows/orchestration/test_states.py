"""States of a run: cancelled, crashed or ended in another way, in the store's events and in Prefect's words."""

import logging
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, call
from uuid import uuid4

import httpx
import pytest
from prefect.states import Cancelling

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.cli.run import run_in_flow
from flows.orchestration import run_flow, server, states
from flows.orchestration.run_flow import reports_its_end
from flows.orchestration.states import (
    ASK_SECONDS,
    Cancellation,
    EmptyBatch,
    GateRefused,
    RunCancelled,
    event_of,
    mark_crashed,
    other_writers,
)
from flows.runtime import entry
from flows.services.ownership import recorded_identity, writer_alive
from storage.errors import StoreUnavailable
from storage.store import open_store
from tasks.runtime.prefect_task import error_text, is_transient
from tests.fixtures.faults import happened
from tests.fixtures.rehearsal import session_for


@pytest.fixture
def client(monkeypatch):
    """Let a client of Prefect be one with these methods alone."""

    def play(**methods):
        playing = nullcontext(SimpleNamespace(**methods))
        monkeypatch.setattr("prefect.client.orchestration.get_client", lambda sync_client: playing)

    return play


def noted(error, *notes):
    for note in notes:
        error.add_note(note)
    return error


def ending(error):
    @reports_its_end
    def flow():
        raise error

    return flow()


def test_a_cancelled_flow_ends_as_cancelled():
    cancelled = RunCancelled("cancelled before stage packing")
    state = ending(cancelled)
    assert (state.type.value, state.message) == ("CANCELLED", str(cancelled))
    with pytest.raises(RunCancelled):
        state.result()


@pytest.mark.parametrize("error", [ConfigError(["steps: 0 is too few"]), KeyError("x")])
def test_a_failed_flow_says_its_notes_and_whoever_calls_it_gets_the_error(error):
    state = ending(noted(error, "Nothing was started.", "Correct it."))
    told = f"{type(error).__name__}: {error}\nNothing was started.\nCorrect it."
    assert (state.type.value, state.message) == ("FAILED", told)
    with pytest.raises(type(error)):
        state.result()


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (EmptyBatch("nothing"), ("evicted", "nothing")),
        (RunCancelled("asked to"), ("cancelled", "asked to")),
        (GateRefused("no"), ("refused", "no")),
        (noted(ValueError("broken"), "All is safe."), ("failed", "ValueError: broken\nAll is safe.")),
        (KeyboardInterrupt(), ("interrupted", f"interrupted from the keyboard{states.SAFE}")),
        (SystemExit(143), ("interrupted", f"ended by SIGTERM{states.SAFE}")),
        (SystemExit(2), ("failed", "SystemExit: 2")),
    ],
)
def test_the_event_of_an_error(error, event):
    assert event_of(error, "a", "s") == event


def test_a_run_that_was_cancelled_is_not_called_failed_because_the_api_was_busy(monkeypatch, client):
    class TerminationSignal(BaseException):
        """Called as Prefect calls it."""

    busy = httpx.ReadTimeout("busy")
    client(read_flow_run=Mock(side_effect=[busy, busy, SimpleNamespace(state=Cancelling())]))
    monkeypatch.setattr(server, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(states, "current_flow_run", lambda: "its id")
    assert event_of(TerminationSignal(), "a", "s", "packing of step 1") == (
        "cancelled",
        "cancelled in Prefect at packing of step 1. Everything done so far is safe in s; go on with: "
        "stagecoach resume a --store s",
    )


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
def test_only_what_may_pass_is_called_again(error, again):
    """Prefect hands over the error itself where it was raised, and the returned state where one was returned."""
    returned = SimpleNamespace(data=error, message=error_text(error))
    assert is_transient(None, None, SimpleNamespace(data=error)) is again
    assert is_transient(None, None, SimpleNamespace(data=returned)) is again


def test_it_asks_at_once_and_then_not_for_a_while_and_once_cancelled_it_stays_so():
    ask, clock = Mock(return_value=False), Mock(return_value=100.0)
    cancellation = Cancellation(ask, clock)
    assert not cancellation.asked_for(None) and not ask.called, "outside of a flow run"
    assert not cancellation.asked_for("run")
    ask.return_value = True
    clock.return_value += ASK_SECONDS * 0.99
    assert not cancellation.asked_for("run") and ask.call_args_list == [call("run")]
    clock.return_value += ASK_SECONDS * 0.02
    assert cancellation.asked_for("run") and ask.call_count == 2
    ask.return_value = False
    clock.return_value += 100 * ASK_SECONDS
    assert cancellation.asked_for("run") and ask.call_count == 2


def test_a_cancelled_run_says_how_it_goes_on(monkeypatch, root):
    context = SimpleNamespace(flow_run=SimpleNamespace(id="flow run"))
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: context)
    asked = {"flow run": "as Prefect was asked to: it lost"}
    monkeypatch.setattr(Cancellation, "asked_for", lambda _, flow_run: asked[flow_run])
    with pytest.raises(RunCancelled, match=r"to: it lost\..* safe in [^;]*; go on with: stagecoach resume a "):
        session_for(root, "a").stop_if_cancelled(1, "packing")


def config_of(root):
    return RunConfig(name="a", store=str(root))


@pytest.mark.parametrize("end", [{"steps": []}, ValueError("the run's own"), None])
def test_a_prefect_that_cannot_write_down_an_end_does_not_change_it(monkeypatch, tmp_path, end):
    """`end` is what the run returns or raises; with None Prefect fails before the flow is called."""

    def work():
        if isinstance(end, Exception):
            raise end
        return end

    def flow_of(kind):
        def call(function, *parameters):
            if end is not None:
                reports_its_end(function)(*parameters)
            raise httpx.HTTPError("Server error '500 Internal Server Error' for url 'http://x'\nmore")

        return lambda function: partial(call, function)

    monkeypatch.setattr(run_flow, "run_flow", flow_of)
    told = []
    run = partial(run_in_flow, config_of(tmp_path), work, lambda event, text: told.append(text))
    if isinstance(end, dict):
        assert run() == end
        assert len(told) == 1 and told[0].startswith("Prefect did not get the end") and "\n" not in told[0]
        return
    with pytest.raises(ValueError if end else server.PrefectFailed) as raised:
        run()
    assert raised.value is end or "Nothing was started" in str(raised.value)


def test_what_prefect_is_only_told_of_costs_a_line_where_it_answers_with_an_error(
    monkeypatch, client, caplog, tmp_path
):
    fail = Mock(side_effect=httpx.HTTPError("Server error '500 Internal Server Error'\nresponse: {}"))
    client(read_flow_run=fail, set_flow_run_state=fail, read_flow_runs=fail)
    monkeypatch.setattr(entry, "current_flow_run", lambda: str(uuid4()))
    monkeypatch.setattr(server, "probe", lambda url: None)
    entry.link(config_of(tmp_path))
    server.PrefectApi("http://x/api").wait()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    beginnings = ["Prefect did not get its run and store", "Prefect did not get the end of dead processes"]
    assert [line.partition(":")[0] for line in told] == beginnings
    assert all("500" in line and "\n" not in line for line in told)


@pytest.mark.parametrize(
    ("event", "flow_run", "expected"),
    [
        ("finished", "f", "COMPLETED"),
        ("cancelled", "f", "CANCELLED"),
        ("failed", "f", "FAILED"),
        ("resumed", "f", "CRASHED"),
        ("finished", "another", "CRASHED"),
    ],
)
def test_a_flow_run_that_could_not_report_its_end_gets_the_one_that_its_store_has(store, event, flow_run, expected):
    begin(store, "a", event=event, flow_run=flow_run)
    tags = ["stagecoach", "run:a", f"store:{store.root.address}"]
    assert server.missed_state(tags, "f").type.value == expected
    assert server.missed_state(["stagecoach", "run:a", "store:/nowhere"], "f").type.value == "CRASHED"


CONFIG = RunConfig().model_dump(mode="json")


@pytest.fixture
def store(root):
    return open_store(root)


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def begin(store, run, pid=None, event="started", **place):
    place = {"flow_run": f"flow-{run}"} | place
    store.runs.record(run=run, event=event, kind="train", config=CONFIG, pid=pid, **place)


def test_a_run_of_a_dead_process_is_marked_once(store):
    gone = dead_process()
    begin(store, "dead", gone)
    begin(store, "again", gone, event="resumed")
    assert sorted(mark_crashed(store)) == ["again", "dead"]
    last = store.runs.events("dead")[-1]
    assert (last.event, last.pid, last.flow_run) == ("crashed", gone, "flow-dead")
    assert str(gone) in last.message and "safe" in last.message
    assert mark_crashed(store) == []


def test_a_living_run_an_ended_one_and_another_host_are_left_alone(store):
    begin(store, "living", os.getpid())
    begin(store, "elsewhere", dead_process(), host="another")
    begin(store, "ended", dead_process())
    store.runs.record(run="ended", event="finished")
    assert mark_crashed(store) == []


def test_a_process_id_that_came_back_is_not_the_run(store):
    begin(store, "a", os.getpid())
    event = store.runs.events("a")[-1]
    assert event.process == "" and writer_alive(event), "as older versions have written it"
    boot, pid, ticks = recorded_identity().split(":")
    assert not writer_alive(replace(event, process=f"{boot}:{pid}:{int(ticks) - 1}"))
    assert not writer_alive(replace(event, process=f"of-another-boot:{pid}:{ticks}"))


@pytest.mark.fault("clock", "the clock is set forward while a run works", "its process is seen by its start ticks")
def test_a_clock_that_was_set_takes_no_living_run_for_dead(store):
    begin(store, "a", process=recorded_identity())
    # After a step of an hour the kernel says that this process has begun an hour later than it did.
    (event,) = open_store(store.root.address).runs.events("a")
    stepped = replace(event, at=event.at - timedelta(hours=1))
    happened(f"recorded by {event.process} an hour before it began, by the wall clock")
    assert (event.message, event.process) == ("", recorded_identity())
    assert writer_alive(stepped)


@pytest.mark.fault("two writers", "a second process goes to work on a run", "each is told of the other")
def test_each_writer_is_told_of_the_others(store):
    assert other_writers(store, "a") == []
    begin(store, "a", os.getppid())
    since = store.runs.events("a")[-1].at
    (told,) = other_writers(store, "a")
    assert f"{os.getppid()} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S} UTC" in told
    happened(told)
    begin(store, "b", 7, host="elsewhere")
    assert "7 on elsewhere, as far as can be seen from here, since" in other_writers(store, "b")[0]
    begin(store, "a", os.getpid(), event="resumed")
    assert len(other_writers(store, "a")) == 1, "the first one works on; that this process does too is no news to it"
    store.runs.record(run="a", event="finished", pid=os.getppid())
    assert other_writers(store, "a") == []
    begin(store, "dead", dead_process())
    assert other_writers(store, "dead") == []


@pytest.mark.parametrize(("before", "warns"), [(None, False), ("Completed", False), ("Cached", True)])
def test_a_run_that_computed_nothing_says_so_and_a_schedule_that_repeats_it_warns(
    monkeypatch, client, caplog, before, warns
):
    earlier = [SimpleNamespace(state_name=before)] if before else []
    client(read_flow_runs=lambda flow_run_filter, sort, limit: earlier)
    mine = SimpleNamespace(id=uuid4(), deployment_id=uuid4(), auto_scheduled=True)
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: SimpleNamespace(flow_run=mine))
    monkeypatch.setattr(run_flow, "current_flow_run", lambda: str(mine.id))
    monkeypatch.setattr(run_flow, "_run_log", lambda: logging.getLogger("stagecoach"))
    outcome = {"run": "a", "steps": [], "num_computed": 0, "num_found": 7}
    flow = reports_its_end(lambda: outcome)
    state = flow()
    assert (state.type.value, state.name) == ("COMPLETED", "Cached")
    assert state.message.startswith("Cached: nothing was computed; 0 computed, 7 cached")
    assert ("set continue_run" in state.message) is warns is ("set continue_run" in caplog.text)
    outcome["num_computed"] = 1
    assert flow().name == "Completed"


def test_a_mistake_is_logged_once_and_without_a_traceback(monkeypatch, caplog):
    """Prefect's engine logs what a flow raised once more, with a traceback."""
    prefects, mistake = logging.getLogger("prefect.flow_runs"), ConfigError("no such key")
    monkeypatch.setattr(prefects, "filters", [*prefects.filters])
    monkeypatch.setattr(prefects, "propagate", True)

    @reports_its_end
    def flow(error):
        raise error

    def engine(error):
        caplog.clear()
        try:
            raise error
        except ValueError:
            prefects.error("Engine execution exited with unexpected exception", exc_info=True)
        return caplog.records

    with caplog.at_level(logging.ERROR):
        flow(mistake)
        assert [(each.getMessage(), each.exc_info) for each in caplog.records] == [(error_text(mistake), None)]
        assert engine(mistake) == []
        assert len(engine(ValueError("another"))) == 1

"""Alerts: who gets a message of what, once; a receiver that is gone or hangs delays nothing."""

import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace

import pytest

from configs.alerts import AlertConfig
from flows import cli
from flows.queries.run_state import recorded_warnings
from flows.queries.runs import runs
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import describe_warnings
from flows.runtime import alerts, step_report
from flows.runtime.loop import plan_work
from flows.runtime.preflight import preflight
from storage.records import ALERT, ALERT_FAILED, REMOVED
from storage.store import open_store
from tasks.metrics.warnings import Replies
from tests.fixtures.rehearsal import SOURCE, play, rehearse, session_for
from tests.fixtures.waiting import PATIENCE

SECRET = "3ccdd113474722377935511fc85d3dd4"
TOLD = [{"variable": "CHAT_WEBHOOK"}]
MAIL = ("220 here", "250 here", "250 ok", "250 ok", "354 go on", "250 taken", "221 bye")
"""What a mail server says to a client that sends one message."""


class Receiver:
    """A chat that takes, refuses or does not answer messages, or a mail server, in threads."""

    def __init__(self, monkeypatch):
        self.taken, self.status, self.answers = [], 200, threading.Event()
        self.answers.set()
        self._monkeypatch, self._servers = monkeypatch, []

    def listen(self, scheme="mmost", more=f"/{SECRET}?rto=120"):
        methods = {"handle": lambda request: self._take_mail(request)}
        if scheme != "mailto":
            methods = {"do_POST": lambda request: self._take_post(request), "log_message": lambda *given: None}
        kind = StreamRequestHandler if scheme == "mailto" else BaseHTTPRequestHandler
        server = ThreadingTCPServer(("127.0.0.1", 0), type("Handler", (kind,), methods))
        server.daemon_threads = True
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._monkeypatch.setenv("CHAT_WEBHOOK", f"{scheme}://127.0.0.1:{server.server_address[1]}{more}")

    def _take_post(self, request):
        self.taken.append(json.loads(request.rfile.read(int(request.headers["Content-Length"])))["text"])
        self.answers.wait()
        request.send_response(self.status)
        request.end_headers()

    def _take_mail(self, request):
        replies, is_text = iter(MAIL), False
        request.wfile.write(f"{next(replies)}\r\n".encode())
        for line in request.rfile:
            self.taken.append(line.decode().strip())
            is_text = self.taken[-1] != "." and (is_text or self.taken[-1].upper() == "DATA")
            if not is_text or self.taken[-1].upper() == "DATA":
                request.wfile.write(f"{next(replies)}\r\n".encode())

    def close(self):
        self.answers.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def receiver(monkeypatch):
    made = Receiver(monkeypatch)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine is no fault of a receiver."""
    monkeypatch.setattr(alerts, "COMMAND_SECONDS", PATIENCE)
    monkeypatch.setattr(alerts, "END_SECONDS", PATIENCE)


def run(root, told=TOLD, **changes):
    """Go through the small run with its alerts, and wait for these."""
    watchers = []

    def watch(session):
        watchers.append(alerts.AlertWatcher(session.config))
        session.watchers = tuple(watchers)

    try:
        return rehearse(root, "run", watch=watch, alerts=told, **changes)
    finally:
        watchers[0].close()


def recorded(root, event):
    return [each.message for each in open_store(root).runs.service_events("run") if each.event == event]


def test_each_failure_is_told_and_the_end_once_also_when_the_run_is_resumed(tmp_path, receiver, monkeypatch):
    def broken(*given, **named):
        raise ValueError("no learner")

    root = tmp_path / "store"
    receiver.listen()
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="no learner"):
            play(patch, training=broken)
            run(root)
    failed, again = receiver.taken
    assert again == failed, "of a run that was resumed"
    assert "Stagecoach: run failed" in failed and "no learner" in failed and str(root) in failed
    for _ in range(2):
        store = run(root)
    assert ["Stagecoach: run finished" in text for text in receiver.taken] == [False, False, True]
    assert recorded(root, ALERT)[2:] == ["CHAT_WEBHOOK: 2 steps finished"] and not recorded(root, ALERT_FAILED)
    assert store.runs.last_event("run") == "finished" == runs(StoreReader.at(root))["state"].item()
    store.runs.record(run="run", event=REMOVED)
    run(root)
    assert len(receiver.taken) == 4 and len(recorded(root, ALERT)) == 1, "of another run of that name"
    # They are in no key: a run without them finds everything.
    work = plan_work(session_for(root, "other").context, SOURCE)
    assert work and not [ref for ref in work if ref.computed]


@pytest.mark.parametrize("state", ["refuses", "is dead", "hangs"])
def test_a_receiver_that_does_not_answer_delays_nothing(state, tmp_path, receiver, monkeypatch, caplog):
    root = tmp_path / "store"
    if state == "is dead":
        monkeypatch.setenv("CHAT_WEBHOOK", f"mmost://127.0.0.1:1/{SECRET}")
    else:
        receiver.listen()
        receiver.status = 404
    if state == "hangs":
        receiver.answers.clear()
        monkeypatch.setattr(alerts, "END_SECONDS", 0.1)
    run(root, steps=1)
    assert open_store(root).runs.last_event("run") == "finished" and SECRET not in caplog.text
    if state == "hangs":
        assert "was dropped, as the run has ended: CHAT_WEBHOOK: 1 steps finished" in caplog.text
    else:
        assert "not taken" in recorded(root, ALERT_FAILED)[0] and "was not sent: CHAT_WEBHOOK" in caplog.text


def test_the_reason_of_a_message_is_not_that_of_another_thread(monkeypatch):
    def notify(*given, **named):
        said = logging.getLogger("apprise").warning
        other = threading.Thread(target=said, args=("of another",))
        other.start()
        other.join()
        said("of this")

    monkeypatch.setattr(alerts, "_service", lambda alert: SimpleNamespace(notify=notify))
    with pytest.raises(OSError, match=r"^not taken: of this$"):
        alerts.send(AlertConfig(variable="CHAT_WEBHOOK"), {"run": "a", "about": "failed", "text": "b", "store": "c"})


def test_a_command_gets_the_facts_and_may_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)  # no command needs it, least of all its import in a thread
    program = f"import sys; open({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read())"
    told = [{"command": [sys.executable, "-c", text], "on": ["finished"]} for text in (program, "raise SystemExit(3)")]
    run(tmp_path / "store", told, steps=1)
    facts = json.loads((tmp_path / "told").read_text())
    assert (facts["run"], facts["about"], facts["store"]) == ("run", "finished", str(tmp_path / "store"))
    assert "exit status 3" in recorded(tmp_path / "store", ALERT_FAILED)[0]


def test_the_doctor_sends_a_test_message_by_e_mail(tmp_path, receiver, capsys):
    receiver.listen("mailto", "?from=run@here.org&to=a@there.org")
    told = "alerts = [{ variable = 'CHAT_WEBHOOK' }, { command = ['/none'] }]\n"
    words = "[[environments]]\nname = 'words'\ntaskset = { id = 'sample_reverse_text' }\n"
    (tmp_path / "own.toml").write_text(told + words)
    assert cli.main(["doctor", "--alerts", str(tmp_path / "own.toml")]) == 1
    printed = capsys.readouterr().out
    assert "ok    CHAT_WEBHOOK: the message was taken" in printed and "bad   /none" in printed
    assert {"Subject: Stagecoach: test test", "stagecoach doctor: nothing is wrong"} <= {*receiver.taken}
    (tmp_path / "own.toml").write_text(words)
    assert cli.main(["doctor", "--alerts", str(tmp_path / "own.toml")]) == 2
    assert "has none" in capsys.readouterr().err


def test_what_cannot_be_sent_is_refused_before_anything_starts_and_check_says_who_is_told(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CHAT_WEBHOOK", "no URL")
    told = [*TOLD, {"variable": "UNSET"}, {"command": ["no-such-program"]}, {}, {"variable": "A", "command": ["true"]}]
    with pytest.raises(ValueError, match=r"alerts\.0: 'CHAT_WEBHOOK' is no variable") as caught:
        preflight(session_for(tmp_path, "run", alerts=told), [])
    assert all(f"alerts.{place}: " in str(caught.value) for place in range(5))
    assert cli.main(["check", "demo", 'alerts=[{variable="CHAT_WEBHOOK", on=["gate"]}]']) == 0
    printed = capsys.readouterr().out
    assert "alerts       CHAT_WEBHOOK: gate" in printed and "warning: alerts.0" in printed


def test_a_warning_is_one_message_and_one_event_of_the_run(tmp_path, receiver, monkeypatch):
    receiver.listen()
    session, steps = session_for(tmp_path / "store", "run", alerts=TOLD), []
    session.watchers = (watcher := alerts.AlertWatcher(session.config),)
    session.record("started")
    monkeypatch.setattr(step_report, "notify_step", lambda *given: None)
    monkeypatch.setattr(step_report, "LOW_SIGNAL", -1)
    monkeypatch.setattr(step_report, "describe", lambda context, step, refs: entropies[step])
    numbers = [1.0] * 10 + [5.0] * 10
    metrics = [{"updates/entropy/mean": number} for number in numbers]
    monkeypatch.setattr(step_report, "_replies", lambda context, refs: Replies([], [], [], {}))
    row = {"computed": True, "num_traces": 0, "outcomes": ()}
    entropies = [row | {"step": step, "metrics": measured} for step, measured in enumerate(metrics)]
    for step in range(20):
        steps.append(
            step_report.finish_step(
                session, SimpleNamespace(step=step, refs=(), batch=SimpleNamespace(traces=())), steps
            )
        )
    watcher.close()
    (warning,) = receiver.taken
    assert "step 11: entropy_grows: updates/entropy/mean rose from 1 to 5" in warning
    (recorded,) = recorded_warnings(session.context.store.runs, "run")
    assert (recorded["step"], recorded["rule"], recorded["where"]) == (11, "entropy_grows", "")
    assert [step["metrics"]["warnings"] for step in steps] == [float(step == 11) for step in range(20)]
    assert describe_warnings(steps).startswith("warnings: entropy_grows at step 11: updates/entropy")

"""Alerts: messages about a run that failed or finished, a gate that waits, a warning.

Each is sent in a thread of its own, which dies with the process: a receiver that is slow or gone delays nothing, but
the end of the run by END_SECONDS at most. A resumed run repeats no message that was sent, but of a failure.
"""

import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread, get_ident
from typing import Any

from configs.alerts import AlertConfig
from configs.run import RunConfig
from flows.reporting.formats import visible
from storage.errors import StoreError
from storage.records import ALERT, ALERT_FAILED
from storage.store import open_store

COMMAND_SECONDS = 5.0
"""Longest time of a command. Services have limits of their own, mostly 4 s."""
END_SECONDS = COMMAND_SECONDS + 1
"""Longest wait for all receivers at the end of a run."""
FAILURES = {"refused": "failed", "evicted": "failed"}
"""Ends of a run that are failures for those who get messages."""
_log = logging.getLogger("stagecoach")


def alert_problems(config: RunConfig) -> list[str]:
    """Return a line for each alert that cannot be sent from here."""
    return [
        f"alerts.{place}: {alert.receiver!r} is no variable that is set to a URL of Apprise, and no command that is "
        "there, or both are named; docs/alerts.md has examples"
        for place, alert in enumerate(config.alerts)
        if not (shutil.which(alert.command[0]) and not alert.variable if alert.command else _service(alert))
    ]


def _service(alert: AlertConfig) -> Any:
    """Return the service at the address of an alert; None where there is none."""
    # A tenth of a second to import, for runs that have alerts.
    from apprise import Apprise

    service = Apprise()
    return service if service.add(os.environ.get(alert.variable, "")) else None


def send(alert: AlertConfig, facts: Mapping[str, str]) -> str:
    """Send a message with `run`, `store`, `about` and `text`, and return that it was taken.

    Raises OSError where it is not taken, and SubprocessError where a command fails.
    """
    if alert.command:
        given = json.dumps(facts).encode()
        subprocess.run(alert.command, input=given, capture_output=True, check=True, timeout=COMMAND_SECONDS)
        return "the command has done its work"
    from apprise import LogCapture

    service, title = _service(alert), "Stagecoach: {run} {about}".format_map(facts)
    # It captures what all threads say, and other messages are on their way: the reason is what this thread says.
    own = f"{get_ident()} "
    with LogCapture(level=logging.WARNING, fmt="%(thread)d %(message)s") as reason:
        if not service or not service.notify("{text}\nstore {store}".format_map(facts), title, body_format="text"):
            lines = [line.removeprefix(own) for line in reason.getvalue().splitlines() if line.startswith(own)]
            raise OSError(f"not taken: {' '.join(lines) or 'there is no such service'}")
    return "the message was taken"


class AlertWatcher:
    """Sends what happens to a run to those whom its config names, and records each message among the run's events."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._runs = config, open_store(config.store).runs
        events = self._runs.service_events(config.name)
        self._sent = {event.message for event in events if event.event == ALERT}
        self._threads = dict[str, Thread]()
        for problem in alert_problems(config):  # which imports the services here: no thread may
            _log.warning(problem)

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Begin to send the messages that an event makes."""
        end = facts.get("ending", event)
        # Slack calls a channel by <!channel>, and a model may have written some of the text.
        about, text = FAILURES.get(end, end), visible(facts.get("text", "")).replace("<!", "<")
        # The text of a good end has counts, which are others when the run is resumed.
        what = f"{self._config.steps} steps finished" if about == "finished" else text
        for alert in self._config.alerts:
            message = f"{alert.receiver}: {what}"
            # A run that fails again after it was resumed is as lost as it was the first time.
            told_before = {*self._threads, *(self._sent if about != "failed" else ())}
            if about in alert.on and message not in told_before:
                told = {"run": self._config.name, "store": self._config.store, "about": about, "text": text}
                self._threads[message] = Thread(target=self._deliver, args=(alert, told, message), daemon=True)
                self._threads[message].start()

    def _deliver(self, alert: AlertConfig, facts: Mapping[str, str], message: str) -> None:
        try:
            send(alert, facts)
            event = ALERT
        except (OSError, subprocess.SubprocessError) as error:
            event, message = ALERT_FAILED, f"{message}: {error}"
            _log.warning("an alert was not sent: %s", message)
        with suppress(StoreError):  # by which the run fails itself
            self._runs.record(run=self._config.name, event=event, message=message)

    def close(self) -> None:
        """Wait for the messages that are being sent, all together at most END_SECONDS; the others are dropped."""
        deadline = time.monotonic() + END_SECONDS
        for message, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("an alert was dropped, as the run has ended: %s", message)

"""A real Prefect server and a process worker with state of their own, and the commands that a person types.

Also a tiny model, and rows that supervised training of it takes seconds for.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.orchestration.server import process_of
from flows.services.ownership import start_time, sweep
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
SILENT_SECONDS = 30.0
"""After so long without a word on a run whose process is gone, a worker has none to say."""
SHAPE = ["--hidden", "32", "--layers", "1", "--heads", "1", "--kv-heads", "1"]
SMALL = ["assignment.groups_per_step=4", "packing.tokens_per_row=256", "packing.updates_per_step=1"]


class Serving:
    """A server and workers below one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = place / "store"
        self.url = ""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "STAGECOACH_"))}
        home = place / "prefect"
        self.environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
            "PREFECT_MEMO_STORE_PATH": str(home / "memo_store.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PREFECT_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def server(self) -> None:
        """Start a server and wait until it answers; at another port where somebody has taken the first meanwhile."""
        while not self._serves_at(free_port()):
            continue

    def _serves_at(self, port: int) -> bool:
        self.url = f"http://127.0.0.1:{port}"
        self.environment |= {"PREFECT_API_URL": f"{self.url}/api", "PREFECT_SERVER_API_PORT": str(port)}
        process = self.begin(PREFECT, "server", "start")
        until(lambda: process.poll() is not None or _answers(self), self.log)
        assert process.poll() is None or "already in use" in self._said(), self.log()
        return process.poll() is None

    def begin(self, *command: str) -> "subprocess.Popen[bytes]":
        """Start a process that stays."""
        with (self.place / "processes.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.place, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def prefect(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run one command of Prefect."""
        return self._run(PREFECT, *arguments)

    def stagecoach(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run one command of ours."""
        return self._run(sys.executable, "-m", "flows.cli", *arguments)

    def worker(self) -> "subprocess.Popen[bytes]":
        """Start a worker."""
        return self.begin(PREFECT, "worker", "start", "--pool", "stagecoach")

    def ask(self, path: str, *items: Any, **body: Any) -> Any:
        """Ask the API: by POST with items or a body, by GET without."""
        data = json.dumps(items or body).encode() if items or body else None
        request = urllib.request.Request(f"{self.url}/api{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def of_the_tiny_model(self, **others: Any) -> dict[str, Any]:
        """Return parameters of `sft` for the tiny model and its rows."""
        return {"model": str(self.place / "model"), "data": str(self.place / "rows.jsonl"), "overrides": SMALL} | others

    def start_run(self, deployment: str, **parameters: Any) -> str:
        """Ask for a run of a deployment, as a person would; return its id."""
        given = [part for name, value in parameters.items() for part in ("-p", f"{name}={json.dumps(value)}")]
        done = self.prefect("deployment", "run", deployment, *given)
        assert done.returncode == 0, done.stdout + done.stderr
        return next(line.split()[-1] for line in done.stdout.splitlines() if "UUID" in line)

    def state(self, flow_run: str) -> tuple[str, str]:
        """Return type and message of a flow run's state."""
        state = self.ask(f"/flow_runs/{flow_run}")["state"]
        return state["type"], state["message"] or ""

    def ended(self, flow_run: str, *types: str) -> tuple[str, str]:
        """Wait until a flow run is in a state of one of these types, or in any final one; return type and message."""
        final = types or ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        until(lambda: self.state(flow_run)[0] in final, lambda: f"{self.state(flow_run)}\n{self.log()}")
        return self.state(flow_run)

    def owner(self, flow_run: str) -> str:
        """Return the identity of the process that a flow run says it has."""
        found = process_of(self.ask(f"/flow_runs/{flow_run}")["tags"])
        assert found is not None
        return found[2]

    def settled(self, flow_run: str) -> None:
        """Wait until the worker has done with a cancelled run: when its process is gone it writes the end once more.

        It writes over a retry that was asked for before. Where the process was gone before it looked, it says nothing.
        """
        process = int(self.owner(flow_run).partition(":")[0])
        until(lambda: start_time(process) is None, self.log)
        done = f"Cancelled flow run '{self.ask(f'/flow_runs/{flow_run}')['name']}'"
        silent = time.monotonic() + SILENT_SECONDS
        until(lambda: done in self._said() or time.monotonic() > silent, self.log)

    def log(self) -> str:
        """Return the end of what server and workers said."""
        return self._said()[-4000:]

    def close(self) -> None:
        """End everything, the last started first."""
        for process in self.processes[::-1]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        sweep()

    def _said(self) -> str:
        return (self.place / "processes.log").read_text(errors="replace")

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, env=self.environment, cwd=self.place, capture_output=True, text=True, timeout=PATIENCE
        )


def tiny_sources(place: Path) -> None:
    """Make the tiny model and its rows: `model` and `rows.jsonl` in a directory."""
    subprocess.run(
        [sys.executable, "-m", "tasks.learner.tiny", str(place / "model"), *SHAPE],
        check=True,
        cwd=ROOT,
        timeout=PATIENCE,
    )
    rows = [{"prompt": f"say {number}", "completion": str(number)} for number in range(12)]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@contextmanager
def serving(place: Path) -> Iterator[Serving]:
    """Give a server that answers, with our deployments, a worker, and what the tiny model needs."""
    tiny_sources(place)
    served = Serving(place)
    try:
        served.server()
        done = served.stagecoach("deploy", "--store", str(served.store))
        assert done.returncode == 0, done.stdout + done.stderr
        served.worker()
        yield served
    finally:
        served.close()


def free_port() -> int:
    """Return a port that the system has free."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _answers(served: Serving) -> bool:
    try:
        return bool(served.ask("/health") is True)
    except (urllib.error.URLError, ConnectionError):
        return False

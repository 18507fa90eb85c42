"""A run in a process of its own that dies at a chosen moment: `python -m tests.crash.program DIRECTORY REQUEST`.

The store, the ledger, the learner's process and, with `"prefect": true`, the embedded Prefect server are real. What is
not: a fixed rollout table stands in for sampling, so no engine and no environment server is started. REQUEST is JSON
with `overrides`, `kill` (the moment, or empty), `stop` (the moment at which the learner is stopped), `name` of the run,
`prefect`, `backwards` (hand groups over in reverse order) and `replays`: where there are any, those are done in turn
and the run is not.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flows.replays.config import prepare_replay
from flows.replays.request import ReplayRequest
from flows.runtime import launch
from flows.runtime.loops import loop_replay, loop_train
from flows.runtime.prepare import prepare
from flows.runtime.session import open_session, record_run
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers
from tasks.inference.engine.scoring import Served
from tasks.rollout import stage as rollout
from tasks.runtime.execute import perform
from tasks.runtime.prefect_task import StageTask
from tests.crash import fixed
from tests.crash.driving import NAME
from tests.crash.killing import Moments, durable_line, kill_self


def main(directory: Path, request: dict[str, Any]) -> None:
    """Run, or go on with, the run in `directory`; write what it made to `outcome.json`."""
    moments = Moments(directory, {request["kill"]: kill_self, request["stop"]: partial(stop_learner, directory)})
    moments.watch()
    replace_sampling(directory, moments, request["backwards"])
    store = str(directory / "store")
    if request["replays"]:
        asked = [ReplayRequest(store=store, **replay) for replay in request["replays"]]
        outcome: Any = [without_prefect(prepare_replay(each)) for each in asked]
    else:
        config = prepare("train", ["demo"], request["overrides"], name=request["name"], store=store)
        outcome = launch.run(config) if request["prefect"] else without_prefect(config)
    (directory / "outcome.json").write_text(json.dumps(outcome))


def stop_learner(directory: Path) -> None:
    """Let the learner stand still for ever, alive: its connections stay open, and nobody answers there."""
    os.kill(json.loads((directory / "store" / "logs" / NAME / "learner.json").read_text())["pid"], signal.SIGSTOP)


def without_prefect(config: Any) -> dict[str, Any]:
    """Walk the run as the flow does, in a session of its own, each stage called where a task would be."""
    StageTask.__call__ = lambda self, *arguments: perform(self.stage, *arguments)  # type: ignore[method-assign]
    with open_session(config) as session:
        session.begin([piece for piece in session.pieces() if piece.computed])
        with record_run(session):
            walk = loop_replay if config.kind == "replay" else loop_train
            return walk(session)


def replace_sampling(directory: Path, moments: Moments, backwards: bool) -> None:
    """Let the fixed rollout table take the place of engine and environments; note every group that is sampled."""

    def begun(group_id: str) -> None:
        durable_line(directory / "sampled.jsonl", group_id)
        moments.happen(f"sampling {group_id}")

    rollout.sample = fixed.sampler(backwards, begun, moments.handed_over)
    InferenceService.begin = EnvironmentServers.begin = lambda self: None  # type: ignore[method-assign, assignment]
    InferenceService.serve = lambda self, policy: Served("http://127.0.0.1:9", "no key")  # type: ignore[method-assign]
    EnvironmentServers.addresses = lambda self: {}  # type: ignore[method-assign]
    EnvironmentServers.examples = lambda self: fixed.examples()  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

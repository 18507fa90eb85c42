"""A whole real run that kills its own services, or itself: `python -m tests.acceptance.program DIRECTORY REQUEST`.

REQUEST is JSON with `overrides` and `kills`, from a moment in the life of the run (see `tests.fixtures.dying_run`) to
what is killed then: the name of a service, whose process tree but for its guardian dies by SIGKILL, or `flow`. With
`stop ` in front of its name a service is not killed, but stands still for ever, as SIGSTOP does; with `behind ` after
that only what its first process has started.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path

from flows.cli.run import run_config
from flows.runtime.resolve_run import resolve_run
from flows.services.base import Supervisor
from flows.services.guardian import descendants, send
from flows.services.ownership import identity
from flows.services.process import Handle
from tests.fixtures.dying_run import Moments, durable_line, kill_self

NAME = "run"
STOP, BEHIND = "stop ", "behind "
SMALL = Path(__file__).with_name("small.toml")
handles: dict[str, Handle] = {}


def main(directory, request):
    """Run, or go on with, the run in `directory`; write what it made, and about its services."""
    remember_handles()
    durable_line(directory / "owners.jsonl", identity())
    plans = {moment: kill_self if what == "flow" else partial(kill, what) for moment, what in request["kills"].items()}
    Moments(directory, plans).watch()
    store = str(directory / "store")
    config = resolve_run("train", ["demo", str(SMALL)], request["overrides"], name=NAME, store=store)
    outcome = run_config(config)
    generations = {name: handle.generation for name, handle in handles.items()}
    reports = {name: handle.report for name, handle in handles.items()}
    (directory / "outcome.json").write_text(json.dumps({**outcome, "generations": generations, "reports": reports}))


def kill(what):
    """Kill or stop a service and whatever it started."""
    handle = handles[what.removeprefix(STOP).removeprefix(BEHIND)]
    number = signal.SIGSTOP if what.startswith(STOP) else signal.SIGKILL
    process, *below = descendants(handle._process.pid)
    send(number, below if BEHIND in what else [process, *below])


def remember_handles():
    """Keep the handle of every service that is started."""
    start = Supervisor.start

    def remembering(supervisor, spec):
        handles[spec.name.split()[0]] = handle = start(supervisor, spec)
        return handle

    Supervisor.start = remembering  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

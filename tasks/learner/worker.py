"""Entry point of the learner's process: `python -m tasks.learner.worker --report PATH`, or the same under torchrun.

Rank 0 listens on two free ports of 127.0.0.1 and writes {"address": ..., "pulse": ..., "pid": ...} to PATH once it can
answer: requests at the first, questions about its progress at the second (tasks.learner.pulse). The process ends on
SIGTERM, and when its standard input is a pipe that closes.
"""

import argparse
import json
import os
import socket
import stat
import threading
from pathlib import Path

from tasks.runtime.imports import quick_imports


def main() -> None:
    """Start the ranks, report the address, serve until the end of the process."""
    parser = argparse.ArgumentParser(description="The learner's process.")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    watch_parent()
    # Read by OpenMP when torch loads it, so before the imports below: spinning threads burn the cores of others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with quick_imports():
        import transformers
        import transformers.masking_utils
        import transformers.modeling_utils  # now, while an engine starts, and not with the first policy

        from tasks.learner.distributed import start_world
        from tasks.learner.pulse import Pulse
        from tasks.learner.service import Service
        from tasks.learner.trainer import Trainer

    world = start_world()
    # Progress bars are for terminals; this output goes to a log file.
    transformers.utils.logging.disable_progress_bar()
    pulse = Pulse()
    service = Service(Trainer(world, pulse.beat), world, pulse)
    if world.rank > 0:
        service.follow()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as pulse_listener:
        pulse.serve(pulse_listener)
        report(arguments.report, {"address": _address(listener), "pulse": _address(pulse_listener), "pid": os.getpid()})
        service.serve(listener)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def watch_parent() -> None:
    """End the process when standard input closes, if it is a pipe or socket; a terminal or /dev/null says nothing."""
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    # Not sys.exit: the main thread may be deep in a matrix product, and nothing here needs cleaning up.
    os._exit(0)


def report(path: Path, content: dict[str, object]) -> None:
    """Write `content` as JSON to `path` so that a reader sees all of it or nothing."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content))
    draft.rename(path)


if __name__ == "__main__":
    main()

"""A service that will not go: ignores SIGTERM, and leaves a double-forked grandchild in a session of its own."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(report: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(report + ".orphan").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(report + ".orphan").exists():
        time.sleep(0.01)
    Path(report).write_text(json.dumps({"pid": os.getpid()}))
    time.sleep(600)


main(sys.argv[1])

"""A service that reports its pid, lives until SIGTERM and ends in order, or ends at once with a given status."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(report: str, status: str = "") -> None:
    print("key", os.environ.get("DEMO_API_KEY", ""), "starts", flush=True)
    if status:
        print("no such model", file=sys.stderr)
        sys.exit(int(status))
    signal.signal(signal.SIGTERM, lambda *_: (Path(report + ".ended").touch(), sys.exit(0)))
    Path(report).write_text(json.dumps({"pid": os.getpid()}))
    while True:
        time.sleep(0.2)  # a signal just before a long sleep would be seen at its end


main(*sys.argv[1:])

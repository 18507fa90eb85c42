"""Trains further in a store that was made to be looked at, and says how long each step took: one line of JSON each.

`python -m benchmarks.viewed.walker ROOT STEPS ROLLOUTS GROUP_SIZE`; finished steps are found in the ledger, quickly.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.rehearsed.walking import walk
from benchmarks.viewing_store import settings, without_rest


def main() -> None:
    """Walk to the end."""
    root, steps, rollouts, group_size = Path(sys.argv[1]), *(int(each) for each in sys.argv[2:5])
    with without_rest():
        began, processor = time.perf_counter(), time.process_time()
        for step in walk(settings(root, steps, rollouts, group_size)):
            now, spent = time.perf_counter(), time.process_time()
            print(json.dumps({"step": step, "seconds": now - began, "processor": spent - processor}), flush=True)
            began, processor = now, spent


if __name__ == "__main__":
    main()

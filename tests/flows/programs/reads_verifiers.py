"""Reads a directory's `traces.jsonl` as verifiers does, and tells what its traces are by verifiers' own reckoning.

`python reads_verifiers.py DIRECTORY` prints one JSON object for each trace: what our own rollouts would record of it.
"""

import json
import sys
from pathlib import Path

from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.trace_store import read_episodes

from tasks.inference.trace_rows.rows import RolloutOrigin, rows_of_trace

ASSIGNMENT = dict.fromkeys(("assignment_id", "group_id", "environment", "example_id"), "")

for episode in read_episodes(Path(sys.argv[1]), Trace[WireTaskData, State, WireAgentConfig]):
    for trace in episode.traces:
        row, messages = rows_of_trace(trace, RolloutOrigin(ASSIGNMENT, "", 0, 0, 1.0), episode.id)
        del row["record"]  # it holds defaults that the file leaves out
        print(json.dumps({"row": row, "messages": messages}, default=str))

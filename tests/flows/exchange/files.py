"""Files that verifiers wrote, and what tests of exchange read of files and stores."""

import json
from pathlib import Path

from flows.queries.step_history import step_history
from storage.store import open_store

FILES = Path(__file__).parents[2] / "tasks/exchange/files"
TOKENS, RELAYED = FILES / "tokens.jsonl", FILES / "relayed.jsonl"
OF_STAGE = {"examples": "examples", "assignments": "assignment"}


def lines(path):
    """Return the lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, rows):
    """Write values as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(root, run, table):
    """Return a table of the first step of a run, up to its rollouts."""
    store = open_store(root)
    return store.read(step_history(store, run).steps[0].work[OF_STAGE.get(table, "rollout")].slices_of(table))


def sampled_trace(trace_id, asked, reward):
    """Return a line that is a trace by itself: a question, and a sampled answer of two tokens."""
    asks = {"message": {"role": "user", "content": asked}, "token_ids": [1], "mask": [False]}
    answers = {"message": {"role": "assistant", "content": "a"}, "sampled": True, "parent": 0}
    answers |= {"token_ids": [2, 3], "mask": [True, True], "logprobs": [-0.1, -0.25]}
    rewards = {"reward": {"score": reward, "weight": 1.0}}
    return {"id": trace_id, "task": {"data": {"x": asked}}, "nodes": [asks, answers], "rewards": rewards}

"""What the tests of this room read: files that verifiers wrote, and a renderer whose tokens are plain to see."""

import json
from pathlib import Path

from tasks.exchange.episodes import ImportContext, Origin
from tasks.exchange.files import read_files

FILES = Path(__file__).parent / "files"
ORIGIN = Origin("a file", 0, 1)


def verifiers_lines(name):
    """Return the lines of a file that the verifiers command line wrote: `tokens` or `relayed`."""
    return [json.loads(line) for line in (FILES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def letters(messages, tools=None):
    """Render every message as its role's first letter and its text, a token for each character."""
    rows = []
    for message in messages:
        tokens = [ord(letter) for letter in message["role"][0] + (message["content"] or "")]
        spoken = message["role"] == "assistant"
        rows.append({"token_ids": tokens, "mask": [False, *[spoken] * (len(tokens) - 1)], "is_content": []})
    return rows


READING = ImportContext(render=letters)


def written(path, lines):
    """Write lines as JSONL; text stands as it is."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read(path, lines, context=READING):
    """Write lines to a file and read it."""
    return read_files([written(path, lines)], context)


def one(trace=lambda trace: None):
    """Return an episode that verifiers wrote, its only trace changed in place by `trace`."""
    line = verifiers_lines("tokens")[0]
    trace(line["traces"][0])
    return line

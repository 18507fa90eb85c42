"""What the tests of this room read: files that verifiers wrote, and a renderer whose tokens are plain to see."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.exchange.episodes import Episode, ImportContext, LineProblem, Origin
from tasks.exchange.files import read_files

FILES = Path(__file__).parent / "files"
ORIGIN = Origin("a file", 0, 1)


def verifiers_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file that the verifiers command line wrote: `tokens` or `relayed`."""
    return [json.loads(line) for line in (FILES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def letters(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[dict[str, Any]]:
    """Render every message as its role's first letter and its text, a token for each character."""
    rows = []
    for message in messages:
        tokens = [ord(letter) for letter in message["role"][0] + (message["content"] or "")]
        spoken = message["role"] == "assistant"
        rows.append({"token_ids": tokens, "mask": [False, *[spoken] * (len(tokens) - 1)], "is_content": []})
    return rows


READING = ImportContext(render=letters)


def written(path: Path, lines: Sequence[Any]) -> Path:
    """Write lines as JSONL; text stands as it is."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read(path: Path, lines: Sequence[Any], context: ImportContext = READING) -> tuple[list[Episode], list[LineProblem]]:
    """Write lines to a file and read it."""
    return read_files([written(path, lines)], context)


def one(trace: Callable[[dict[str, Any]], None] = lambda trace: None) -> dict[str, Any]:
    """Return an episode that verifiers wrote, its only trace changed in place by `trace`."""
    line = verifiers_lines("tokens")[0]
    trace(line["traces"][0])
    return line

"""Reads the files that are imported: JSONL, each line an episode or a trace of verifiers or prime-rl.

Every line that cannot be read is a problem of its own.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.exchange.episodes import (
    LARGEST_STEP,
    Episode,
    ImportContext,
    ImportRefused,
    LineProblem,
    Origin,
    Row,
    Unfit,
    checked_number,
)
from tasks.exchange.verifiers_lines import read_episode
from tasks.inference.trace_rows.rows import canonical_json

STEP = re.compile(r"step_(\d+)")
"""How prime-rl names the directory of a step's files."""
MOST_LINE_BYTES = 2**28
"""Longest line of a JSONL file; images within one are what makes it long."""
MOST_LEVELS = 128
"""Deepest nesting of a value: deeper ones exhaust the stack of programs that read them, ours among them."""
TOO_DEEP = f"a value is nested more than {MOST_LEVELS} levels deep"
MOST_DIGITS = 100
"""Most digits of a whole number."""
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))


def read_files(paths: Sequence[Path], context: ImportContext) -> tuple[list[Episode], list[LineProblem]]:
    """Return the episodes of all files in order, and the lines that are none.

    Raises ImportRefused for a file that cannot be read at all.
    """
    episodes: list[Episode] = []
    problems: list[LineProblem] = []
    for number, path in enumerate(paths):
        for line, value in _lines(path):
            try:
                episode = _episode(value, Origin(str(path), number, line), context)
                _check_columns(episode)
                episodes.append(episode)
            except Unfit as error:
                problems.append(LineProblem(str(path), line, error.reason, error.detail))
            except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, OSError) as error:
                # What is of another shape than its layout shows in many ways; all of them are this line's.
                detail = f"{type(error).__name__}: {error}"
                problems.append(LineProblem(str(path), line, "the line is malformed", detail))
    return episodes, problems


def _check_columns(episode: Episode) -> None:
    """Raise Unfit where a field is of another type than the column that is to hold it."""
    for contract, rows in ((TRACES, episode.traces), (MESSAGES, episode.messages)):
        for column in contract.arrow:
            try:
                pa.array([row[column.name] for row in rows if column.name in row], column.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise Unfit("a field is of another type than its column", f"{column.name}: {error}") from error


def _episode(value: Any, origin: Origin, context: ImportContext) -> Episode:
    if isinstance(value, Unfit):
        raise value
    if not isinstance(value, dict):
        raise Unfit("the line is no JSON object")
    named = STEP.search(origin.file)
    step = int(checked_number(float(named[1]), "step of the path", 0, LARGEST_STEP)) if named else None
    return read_episode(value, origin, context, step)


def require_regular(path: Path) -> None:
    """Raise ImportRefused for a path that is there and no file: a pipe or a device may never end, and is read twice."""
    if path.exists() and not path.is_file():
        raise ImportRefused(f"{path} is no regular file, but a directory, a pipe or a device. Nothing was written.")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every line that is not blank; an Unfit in place of a line that cannot be parsed."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), start=1):
                if len(text) > MOST_LINE_BYTES:
                    raise ImportRefused(
                        f"{path}, line {number}: longer than {MOST_LINE_BYTES} bytes. Nothing was written."
                    )
                if text.strip():
                    yield number, _parse(text)
    except OSError as error:
        raise ImportRefused(f"{path} cannot be read: {error.strerror}. Nothing was written.") from error


def _parse(text: bytes) -> Any:
    try:
        value = _read_json(text)
        # json takes it, and the first write to a table would fail far from here.
        if b"\\ud" in text.lower():  # half of a surrogate pair is JSON and no text
            canonical_json(value).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unfit("the line is not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return Unfit("the line is not JSON", str(error))
    except Unfit as error:
        return error
    return value


def _read_json(text: bytes) -> Any:
    """Return what a JSON text says; raise Unfit where readers would differ, or fail: see `MOST_LEVELS`, `MOST_DIGITS`.

    An object that says a key twice says two things, of which each reader takes one. What `json` raises passes through.
    """
    # A reader of numbers in Python is slow: it comes in where there may be a long one, if only within a string.
    integer = _integer if LONG_NUMBER.search(text) else None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=integer)
    except RecursionError as error:
        raise Unfit(TOO_DEEP) from error
    inside = [value]
    for _ in range(MOST_LEVELS + 1):
        inside = [
            each
            for outer in inside
            if isinstance(outer, (dict, list))
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, (dict, list))
        ]
    if inside:
        raise Unfit(TOO_DEEP)
    return value


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise Unfit("a key is there twice", repr(twice[:40]))
    return found


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Unfit(f"a number has more than {MOST_DIGITS} digits", f"{text[:12]}... of {len(text)}")
    return int(text)

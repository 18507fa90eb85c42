"""Files that are imported, line by line: JSONL or Parquet, in whatever form; every line that cannot be is a problem."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl

from tasks.exchange.conversations import is_conversation, read_conversation
from tasks.exchange.episodes import Episode, ImportContext, ImportRefused, LineProblem, Origin, Row, Unfit, canonical
from tasks.exchange.verifiers_lines import is_verifiers, read_episode

Format = Literal["auto", "verifiers", "messages", "prompt"]
FIELDS = {"messages": ("messages",), "prompt": ("prompt", "completion")}
STEP = re.compile(r"step_(\d+)")
"""How prime-rl names the directory of a step's files."""


def read_files(paths: Sequence[Path], form: Format, context: ImportContext) -> tuple[list[Episode], list[LineProblem]]:
    """Return the episodes of all files in order, and the lines that are none.

    Raises ImportRefused for a file that cannot be read at all.
    """
    episodes: list[Episode] = []
    problems: list[LineProblem] = []
    repeats: Counter[str] = Counter()
    for number, path in enumerate(paths):
        for line, value in _lines(path):
            origin = Origin(str(path), number, line)
            try:
                episodes.append(_episode(value, origin, form, context, path, repeats))
            except Unfit as error:
                problems.append(LineProblem(str(path), line, error.reason, error.detail))
            except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
                # What is of another shape than its layout shows in many ways; all of them are this line's.
                problems.append(
                    LineProblem(str(path), line, "the line is malformed", f"{type(error).__name__}: {error}")
                )
    return episodes, problems


def _episode(
    value: Any, origin: Origin, form: Format, context: ImportContext, path: Path, repeats: "Counter[str]"
) -> Episode:
    if isinstance(value, Unfit):
        raise value
    if not isinstance(value, dict):
        raise Unfit("the line is no JSON object")
    found = _form(value, form)
    named = STEP.search(str(path))
    step = int(named[1]) if named else None
    if found == "verifiers":
        return read_episode(value, origin, context, step)
    text = canonical(value)
    repeats[text] += 1
    return read_conversation(value, origin, context, step, repeats[text] - 1)


def _form(value: Row, form: Format) -> str:
    if form in FIELDS:
        missing = [name for name in FIELDS[form] if value.get(name) is None]
        if missing:
            raise Unfit(f"the line has no `{'` and no `'.join(missing)}`")
        return form
    if is_verifiers(value):
        return "verifiers"
    if form == "verifiers":
        raise Unfit("the line is neither an episode nor a trace", "it has neither `traces` nor `nodes`")
    if not is_conversation(value):
        has = ", ".join(list(value)[:8]) or "nothing"
        raise Unfit("the line is in no known form", f"it has {has}")
    return "messages" if value.get("messages") is not None else "prompt"


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every line that is not blank; what cannot be parsed as an Unfit in its place."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path).iter_rows(named=True), start=1)
        return
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, _parse(text)
    except OSError as error:
        raise ImportRefused(f"{path} cannot be read: {error.strerror}. Nothing was written.") from error


def _parquet(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ImportRefused(f"{path} cannot be read as Parquet: {error}. Nothing was written.") from error


def _parse(text: bytes) -> Any:
    try:
        value = json.loads(text)
        if b"\\ud" in text.lower():  # half of a surrogate pair is JSON and no text
            canonical(value).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unfit("the line is not UTF-8", str(error))
    except (json.JSONDecodeError, RecursionError) as error:
        return Unfit("the line is not JSON", str(error))
    return value

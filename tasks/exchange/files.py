"""Reads the files that are imported, line by line: JSONL or Parquet, episodes or conversations.

Every line that cannot be read is a problem of its own. A conversation (messages, or prompt and completion, with
rewards: what evaluation scripts, datasets and `results.jsonl` of earlier verifiers hold) becomes a trace of one branch
whose tokens are the renderer's.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

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
    canonical,
    checked_number,
    digest,
    first,
    mapping,
)
from tasks.exchange.traces import check_message, trace_rows
from tasks.exchange.verifiers_lines import is_verifiers, read_episode

Format = Literal["auto", "verifiers", "messages", "prompt"]
FIELDS = {"messages": ("messages",), "prompt": ("prompt", "completion")}
FORMS = "an episode with `traces`, a trace with `nodes`, `messages`, or `prompt` and `completion`"
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
BATCH_ROWS = 64
MOST_UNPACKED, MOST_EXPANSION = 2**28, 200
"""A Parquet file that unpacks to more bytes than the first, and to more than so many times its size, is refused."""


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
                episode = _episode(value, origin, form, context, path, repeats)
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


def _episode(
    value: Any, origin: Origin, form: Format, context: ImportContext, path: Path, repeats: "Counter[str]"
) -> Episode:
    if isinstance(value, Unfit):
        raise value
    if not isinstance(value, dict):
        raise Unfit("the line is no JSON object")
    found = _form(value, form)
    named = STEP.search(str(path))
    step = int(checked_number(float(named[1]), "step of the path", 0, LARGEST_STEP)) if named else None
    if found == "verifiers":
        return read_episode(value, origin, context, step)
    # Conversations have no ids: the n-th of equal lines is distinguished by its number.
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
        raise Unfit("the line is in no known form", f"it has {has}; known are {FORMS}")
    return "messages" if value.get("messages") is not None else "prompt"


def require_regular(path: Path) -> None:
    """Raise ImportRefused for a path that is there and no file: a pipe or a device may never end, and is read twice."""
    if path.exists() and not path.is_file():
        raise ImportRefused(f"{path} is no regular file, but a directory, a pipe or a device. Nothing was written.")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every line that is not blank; what cannot be parsed as an Unfit in its place."""
    require_regular(path)
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), start=1)
        return
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


def _parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a few at a time: a small file may hold one value a billion times."""
    try:
        with pq.ParquetFile(path) as file:
            chunks = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
            unpacked, most = 0, max(MOST_UNPACKED, MOST_EXPANSION * path.stat().st_size)
            values = sum(group.column(n).num_values for group in chunks for n in range(group.num_columns))
            if values > most:  # not even begun: one row may hold all of them
                raise _bomb(path, most)
            for batch in file.iter_batches(BATCH_ROWS):
                unpacked += batch.nbytes
                if unpacked > most:
                    raise _bomb(path, most)
                yield from pl.DataFrame(pa.Table.from_batches([batch])).iter_rows(named=True)
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise ImportRefused(f"{path} cannot be read as Parquet: {error}. Nothing was written.") from error


def _bomb(path: Path, most: int) -> ImportRefused:
    what = f"{path} of {path.stat().st_size} bytes unpacks to more than {most} bytes"
    return ImportRefused(f"{what}. Nothing was written. Write it as JSONL, if that is what it is to hold.")


def _parse(text: bytes) -> Any:
    try:
        value = read_json(text)
        # json takes it, and the first write to a table would fail far from here.
        if b"\\ud" in text.lower():  # half of a surrogate pair is JSON and no text
            canonical(value).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unfit("the line is not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return Unfit("the line is not JSON", str(error))
    except Unfit as error:
        return error
    return value


def read_json(text: bytes) -> Any:
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


USED = ("messages", "prompt", "completion", "reward", "rewards", "metrics", "info", "tools", "trace_id", "group_id")
"""Fields with a meaning of their own; the others are the task's data."""
EXAMPLE_IDS = ("example_id", "task_id", "problem_id", "id")
"""Fields that may name the example, the first that is there; beside a group, `id` names the row."""


def is_conversation(line: Mapping[str, Any]) -> bool:
    """Tell whether a line has messages, or a prompt and a completion."""
    return line.get("messages") is not None or (line.get("prompt") is not None and line.get("completion") is not None)


def read_conversation(line: Row, origin: Origin, context: ImportContext, step: int | None, repeat: int) -> Episode:
    """Return the episode of a line; `repeat` tells equal lines apart. Raises Unfit where it cannot become rows."""
    if not is_conversation(line):
        raise Unfit("the line has neither `messages` nor `prompt` and `completion`")
    messages = _messages(line)
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or replies[-1] != len(messages) - 1:
        raise Unfit("the conversation does not end with an assistant message")
    # What the file calls the prompt may hold answers of its own; of bare messages it ends with the first answer.
    num_prompt = replies[0] if line.get("messages") is not None else len(_conversation(line["prompt"], ""))
    prompt = messages[:num_prompt]
    trace_id = str(line.get("trace_id") or digest("conversation", canonical(line), str(repeat)))
    trace = _trace(line, trace_id, messages, prompt)
    row, rows = trace_rows(trace, context, {"file": origin.number, "line": origin.line, "conversation": True})
    data = trace["task"]["data"]
    group = line.get("group_id")
    names = [line[name] for name in ("environment", "env_id", "env_name", "task") if isinstance(line.get(name), str)]
    named = first(*(line.get(name) for name in EXAMPLE_IDS if group is None or name != "id"))
    return Episode(
        origin=origin,
        episode_id=trace_id,
        environment=context.environment or first(*names, "imported"),
        example_id=digest(canonical(prompt)) if named is None else str(named),
        task=canonical(data),
        group=None if group is None else str(group),
        step=step,
        traces=[row],
        messages=rows,
        same=canonical(prompt),  # other fields may be of the row: how long it took, what it cost
    )


def _messages(line: Mapping[str, Any]) -> list[Row]:
    if line.get("messages") is not None:
        found = _conversation(line["messages"], "user")
    else:
        found = _conversation(line["prompt"], "user") + _conversation(line["completion"], "assistant")
    for number, message in enumerate(found):
        check_message(message, f"message {number}")
    # Parquet fills in fields that only other rows have.
    return [{name: value for name, value in message.items() if value is not None} for message in found]


def _conversation(value: Any, role: str) -> list[Row]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise Unfit("messages are neither text nor a list of messages")
    return [dict(message) for message in value]


def _trace(line: Mapping[str, Any], trace_id: str, messages: Sequence[Row], prompt: Sequence[Row]) -> Row:
    """Return the conversation in verifiers' form, so that it can be scored again and exported like any other."""
    first_reply = len(prompt)
    nodes = [
        {
            "parent": number - 1 if number else None,
            "message": message,
            # An assistant message within the prompt was not sampled for this task.
            "sampled": message["role"] == "assistant" and number >= first_reply,
        }
        for number, message in enumerate(messages)
    ]
    data = {name: value for name, value in line.items() if name not in USED and value is not None}
    return {
        "version": 1,
        "id": trace_id,
        "task": {"type": "WireTaskData", "data": {"idx": 0, **data, "prompt": _prompt(prompt)}},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "tools": _tools(line.get("tools")),
        "nodes": nodes,
        "rewards": _rewards(line),
        "metrics": _numbers(line.get("metrics")),
        "info": dict(mapping(_parse_field(line.get("info")))),
        "is_completed": True,
        "ok": True,
        "errors": [],
        "timing": {"start": 0.0},
    }


def _prompt(prompt: Sequence[Row]) -> Any:
    alone = len(prompt) == 1 and prompt[0]["role"] == "user" and isinstance(prompt[0].get("content"), str)
    return prompt[0]["content"] if alone else list(prompt)


def _rewards(line: Mapping[str, Any]) -> Row:
    """Return the named rewards; a line without any was not scored, which is not a reward of zero."""
    if line.get("reward") is not None:
        return {"reward": {"score": line["reward"], "weight": 1.0}}
    return {name: {"score": score, "weight": 1.0} for name, score in _numbers(line.get("rewards")).items()}


def _numbers(values: Any) -> dict[str, float]:
    said = {name: value for name, value in mapping(_parse_field(values)).items() if value is not None}
    # A float may be NaN or infinite, which is for the trace to judge.
    return {name: value if isinstance(value, float) else checked_number(value, name) for name, value in said.items()}


def _tools(value: Any) -> list[Row]:
    tools = _parse_field(value) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unfit("tools are no list of objects")
    return [dict(tool.get("function", tool)) for tool in tools]


def _parse_field(value: Any) -> Any:
    """Return what a JSON text says: Parquet files often hold objects so."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value.encode())
    except json.JSONDecodeError as error:
        raise Unfit("a field is neither an object nor JSON", value[:40]) from error

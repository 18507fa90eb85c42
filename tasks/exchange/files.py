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

from tasks.exchange.episodes import (
    Episode,
    ImportContext,
    ImportRefused,
    LineProblem,
    Origin,
    Row,
    Unfit,
    canonical,
    digest,
    first,
    mapping,
)
from tasks.exchange.traces import check_message, trace_rows
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
                detail = f"{type(error).__name__}: {error}"
                problems.append(LineProblem(str(path), line, "the line is malformed", detail))
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
    # Conversations have no ids: the n-th of equal lines is told apart by its number.
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
        # json takes it, and the first write to a table would fail far from here.
        if b"\\ud" in text.lower():  # half of a surrogate pair is JSON and no text
            canonical(value).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unfit("the line is not UTF-8", str(error))
    except (json.JSONDecodeError, RecursionError) as error:
        return Unfit("the line is not JSON", str(error))
    return value


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
        return {"reward": {"score": _number(line["reward"], "reward"), "weight": 1.0}}
    return {name: {"score": score, "weight": 1.0} for name, score in _numbers(line.get("rewards")).items()}


def _numbers(values: Any) -> dict[str, float]:
    return {name: _number(value, name) for name, value in mapping(_parse_field(values)).items() if value is not None}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unfit("a reward or metric is no number", f"{name}: {value!r}")
    return float(value)


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
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise Unfit("a field is neither an object nor JSON", value[:40]) from error

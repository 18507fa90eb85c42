"""Rollouts as a person reads them: prompts once, replies under each other, what was expected, one message as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.messages import Images, branches, messages_of, read_message
from flows.queries.request import PageRequest, parse_object
from flows.queries.rollout_list import COLUMNS
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import cut
from tasks.arrays.message_graph import BrokenGraph

SIZE, LARGEST = 12, 50
"""Replies of a page; `k` asks for another number."""
LINES, FEW_LINES, CHARACTERS = 12, 4, 1200
"""What is seen of a reply, of what leads to it, and of either in one line that does not end."""
MOST_MESSAGES = 20
"""Messages of a prompt, or between it and the reply."""
LONGEST = 8000
"""Characters of a text that are opened on the page; the trace has all."""
EXPECTED = ("answer", "answers", "expected", "target", "solution", "ground_truth")
"""Fields of a task that say what was expected; where it has none, all that is not among ASKED."""
ASKED = ("idx", "id", "key", "name", "description", "prompt", "system_prompt", "row")
FIGURES = ("number", "signed", "whole", "seconds")
Values = dict[str, Any]


def read_rollouts(reader: StoreReader, run: str, rows: pl.DataFrame, request: PageRequest) -> Values:
    """Return a page of rollouts to be read, `k` replies of page `read`, in the order of the rows. Raises BadQuestion.

    `rows` are traces with columns as in `flows.queries.rollouts.traces`.
    """
    rows = rows if request.text("sort") else _agents_together(rows)
    size = request.number("k", SIZE, least=1, most=LARGEST)
    num_pages = max(-(-rows.height // size), 1)
    # An address may be older than the choice of rows: it opens the end, not an error.
    page = min(request.number("read", 1, least=1), num_pages)
    shown = rows.slice((page - 1) * size, size)
    numeric = [column for column in COLUMNS if column.kind in FIGURES and column.name in rows.columns]
    return {
        "replies": _replies(shown, _messages_by_trace(reader, shown), _tasks(reader, run, shown)),
        "figures": [vars(column) for column in numeric if rows[column.name].n_unique() > 1],
        "num_agents": rows["agent"].n_unique(),
        "num_rollouts": rows.height,
        "size": size,
        "page": page,
        "num_pages": num_pages,
    }


def reward_parts(text: str) -> list[Values]:
    """Return the named rewards: name, score, weight and product; all three are null where it was not scored."""
    parts = []
    for name, part in parse_object(text).items():
        score, weight = (part.get(field) if isinstance(part, Mapping) else None for field in ("score", "weight"))
        # A run's environments write these: anything may stand where a number is due.
        product = score * weight if isinstance(score, (int, float)) and isinstance(weight, (int, float)) else None
        parts.append({"name": str(name), "score": score, "weight": weight, "product": product})
    return parts


def read_json(text: str | None) -> Any:
    """Return the value of a JSON text; a text that is none comes back as it is, for somebody wrote it."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


def _agents_together(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with the rollouts of each agent of a group under each other, for they share a prompt."""
    begins = pl.col("at").min()
    order = begins.over("group_id"), begins.over("group_id", "agent"), "at"
    return rows.with_row_index("at").sort(*order).drop("at")


def _messages_by_trace(reader: StoreReader, rows: pl.DataFrame) -> dict[str, list[Values]]:
    messages = messages_of(reader, rows["key"].unique(maintain_order=True), rows["trace_id"].unique())
    # A rollout that several works have, as a replay does, has its messages once for each.
    parts = messages.unique(["trace_id", "message"], maintain_order=True).partition_by("trace_id", as_dict=True)
    return {str(name): _on_last_path(part) for (name,), part in parts.items()}


def _tasks(reader: StoreReader, run: str, rows: pl.DataFrame) -> dict[tuple[str, str], Values]:
    """Return the tasks of the examples of some rollouts, as far as the run listed them."""
    examples = rows.select("environment", "example_id").unique()
    listed = reader.frames(run)["examples"].select("environment", "example_id", "task")
    tasks = listed.join(examples.lazy(), on=["environment", "example_id"], how="semi").collect()
    return {(environment, name): parse_object(task) for environment, name, task in tasks.iter_rows()}


def _expected_answer(task: Values) -> list[Values]:
    filled = {name: value for name, value in task.items() if value not in (None, "")}
    named = {name: filled[name] for name in EXPECTED if name in filled}
    fields = named or {name: value for name, value in filled.items() if name not in ASKED}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return [{"name": name, **_fold(text, FEW_LINES)} for name, text in texts.items()]


def _replies(
    rows: pl.DataFrame, messages: Mapping[str, list[Values]], tasks: Mapping[tuple[str, str], Values]
) -> list[Values]:
    """Return rollouts with their last reply, the prompt, where it is another one than that above, and all between."""
    replies, previous = [], None
    for row in rows.to_dicts():
        said = messages.get(row["trace_id"], [])
        sampled = [place for place, message in enumerate(said) if message["sampled"]]
        first, last = (sampled[0], sampled[-1]) if sampled else (len(said), None)
        example, prompt = (row["environment"], row["example_id"]), _fold_messages(said[:first])
        # What others than the policy said is there to be looked up.
        reply = None if last is None else _fold(said[last]["text"], LINES if row["trainable"] else 1)
        replies.append(
            {"set": None, **row}
            | {"prompt": None if (example, prompt) == previous else prompt, "earlier": _fold_messages(said[first:last])}
            | {"reply": reply, "expected": _expected_answer(tasks.get(example, {}))}
            | {"parts": reward_parts(row["rewards"])}
        )
        previous = example, prompt
    return replies


def _fold_messages(messages: Sequence[Values]) -> Values:
    """Return the last messages of some, each folded, and how many are left out before them."""
    last = [{"role": message["role"], **_fold(message["text"], FEW_LINES)} for message in messages[-MOST_MESSAGES:]]
    return {"messages": last, "left_out": len(messages) - len(last)}


def _fold(text: str, lines: int) -> Values:
    """Return a text in parts: `head`, which is seen, `rest`, which is opened, and how many characters are left out."""
    head = cut("\n".join(text[: LONGEST + 1].split("\n", lines)[:lines]), CHARACTERS)[0]
    rest, left_out = cut(text[len(head) :], LONGEST)
    return {"head": head, "rest": rest.removeprefix("\n"), "left_out": left_out}


def _on_last_path(rows: pl.DataFrame) -> list[Values]:
    """Return role, sampled and text of the messages along the last path of a trace from a root to a leaf."""
    try:
        paths = branches(rows)
    except BrokenGraph:  # then messages stay as they are numbered
        paths = []
    rows = rows.filter(pl.col("message").is_in(paths[-1])).sort("message") if paths else rows
    listed = rows.iter_rows(named=True)
    return [{"role": row["role"], "sampled": row["sampled"], "text": message_text(row)} for row in listed]


def message_text(row: Mapping[str, Any]) -> str:
    """Return all that a message says as one text: thoughts, parts, calls of tools; an image by its name alone."""
    read = read_message(row, Images(()))
    said = [f"(thoughts)\n{read['thoughts']['text']}"] if read["thoughts"] else []
    said += ["(image)" if part["kind"] == "image" else part["text"]["text"] for part in read["parts"]]
    said += [f"(call) {call['name'] or ''} {call['arguments']['text']}" for call in read["calls"]]
    return "\n".join(said)

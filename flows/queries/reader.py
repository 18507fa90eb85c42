"""What rollouts said, to be read under each other or side by side: prompts once, replies, what was expected."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.messages import Images, branches, messages_of, read_message
from flows.queries.request import BadQuestion, PageRequest, parse_object
from flows.queries.rollout_list import (
    ASCENDING,
    COLUMNS,
    DESCENDING,
    column,
    named_columns,
    read_names,
    sort_rows,
    with_named,
    written_names,
)
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import cut
from storage.read.lineage import Work
from tasks.arrays.message_graph import BrokenGraph

SIZE, LARGEST = 12, 50
"""Replies of a page; `k` asks for another number."""
MOST_BESIDE = 4
"""Replies that are read side by side."""
LINES, FEW_LINES, CHARACTERS = 12, 4, 1200
"""What is seen of a reply, of what leads to it, and of either in one line that does not end."""
MOST_MESSAGES = 20
"""Messages of a prompt, or between it and the reply."""
LONGEST = 8000
"""Characters of a text that are opened on the page; the trace has all."""
LONGEST_BESIDE = 20_000
"""Characters of a text that is read beside another."""
HOVER = 200
"""Characters of a reply that a hover shows."""
EXPECTED = ("answer", "answers", "expected", "target", "solution", "ground_truth")
"""Fields of a task that say what was expected; where it has none, all that is not among ASKED."""
ASKED = ("idx", "id", "key", "name", "description", "prompt", "system_prompt", "row")
FACTS = (
    *("trace_id", "key", "group_id", "environment", "example_id", "agent", "trainable", "reward", "advantage"),
    *("outcome", "detail", "error_class", "error_type", "error_message", "stop_condition", "is_truncated", "num_turns"),
    *("num_branches", "num_output_tokens", "policy_version", "step", "for_training", "set"),
)
"""Columns of a rollout that are returned beside its reply; null where the frame does not have it."""
FIGURES = ("number", "signed", "whole", "seconds")
Values = dict[str, Any]
Turn = tuple[list[dict[str, str]], str | None]
"""What came before a sampled message (role and text), and its text; None where nothing was sampled after it."""


def read_rollouts(
    reader: StoreReader, run: str, rows: pl.DataFrame, request: PageRequest, among: pl.DataFrame | None = None
) -> Values:
    """Return a page of rollouts to be read, in the order of the rows, and those that stand side by side.

    `rows` are traces with columns as in `flows.queries.rollouts.traces`. The question: `k` replies of page `read`;
    `beside` names two traces or more, as `written_names` writes them, of the rows or of those `among` which they were
    chosen. Raises BadQuestion.
    """
    rows = rows if request.text("sort") else _agents_together(rows)
    size = request.number("k", SIZE, least=1, most=LARGEST)
    num_pages = max(-(-rows.height // size), 1)
    # An address may be older than the choice of rows: it opens the end, not an error.
    page = min(request.number("read", 1, least=1), num_pages)
    shown, beside = rows.slice((page - 1) * size, size), _beside_rows(rows if among is None else among, request)
    both = pl.concat([shown, beside], how="diagonal")
    said = _conversations(reader, both)
    chosen = beside["trace_id"].to_list()
    return {
        "replies": _replies(shown, said, _tasks(reader, run, both), chosen),
        "beside": _side_by_side(beside, said),
        "chosen": [{"trace_id": each, "without": _toggle(chosen, each)} for each in chosen],
        "figures": _figures(rows),
        "num_agents": rows["agent"].n_unique(),
        "num_rollouts": rows.height,
        "size": size,
        "page": page,
        "num_pages": num_pages,
    }


def sorted_rows(rows: pl.DataFrame, request: PageRequest) -> pl.DataFrame:
    """Return rows by the column that `sort` names, in the `order` asked for. Raises BadQuestion."""
    by = column(request.text("sort"), rows) if request.text("sort") else None
    descending = request.one_of("order", (ASCENDING, DESCENDING), ASCENDING) == DESCENDING
    return sort_rows(with_named(rows, [by.name]) if by else rows, by, descending)


def reply_heads(reader: StoreReader, rows: pl.DataFrame) -> dict[str, str]:
    """Return the beginning of the last reply of each rollout that replied in words, by the trace's id."""
    found = reader.frames().rows(_makers(reader, rows), "messages")
    own = pl.col("sampled") & pl.col("content").is_not_null() & pl.col("trace_id").is_in(rows["trace_id"].implode())
    last = found.filter(own).select("trace_id", "message", "content").sort("message").group_by("trace_id").last()
    return {name: cut(text, HOVER)[0] for name, text in last.select("trace_id", "content").collect().iter_rows()}


def reward_parts(text: str) -> list[Values]:
    """Return the named rewards: name, score, weight and product; all three are null where it was not scored."""
    found = read_json(text)
    if not isinstance(found, Mapping):
        return []
    return [{"name": str(name), **_score_values(each)} for name, each in found.items()]


def _score_values(each: Any) -> Values:
    given = each if isinstance(each, Mapping) else {}
    score, weight = given.get("score"), given.get("weight")
    # A run's environments write these: anything may stand where a number is due.
    product = score * weight if isinstance(score, (int, float)) and isinstance(weight, (int, float)) else None
    return {"score": score, "weight": weight, "product": product}


def read_json(text: str | None) -> Any:
    """Return what a JSON text says; a text that is none comes back as it is, for somebody wrote it."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


def _beside_rows(rows: pl.DataFrame, request: PageRequest) -> pl.DataFrame:
    names = list(dict.fromkeys(read_names(request.text("beside"))))
    missing = [name for name in names if name not in rows["trace_id"]]
    if missing:
        raise BadQuestion(f"beside: {missing[0][:80]!r} is not among these traces")
    if len(names) > MOST_BESIDE:
        raise BadQuestion(f"beside: at most {MOST_BESIDE} traces are read side by side, not {len(names)}")
    order = pl.DataFrame({"trace_id": names}, schema={"trace_id": pl.String})
    return order.join(rows.unique("trace_id", keep="last"), on="trace_id", maintain_order="left").select(rows.columns)


def _agents_together(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with the rollouts of each agent of a group under each other, for they share a prompt."""
    begins = pl.col("at").min()
    order = begins.over("group_id"), begins.over("group_id", "agent"), "at"
    return rows.with_row_index("at").sort(*order).drop("at")


def _toggle(chosen: Sequence[str], trace_id: str) -> str:
    """Return what `beside` is with one trace more, or without it where it is chosen."""
    left = [each for each in chosen if each != trace_id]
    return written_names(left if len(left) < len(chosen) else [*chosen, trace_id][-MOST_BESIDE:])


def _makers(reader: StoreReader, rows: pl.DataFrame) -> list[Work]:
    """Return the work that made the messages of some traces: not their scoring again, which takes them."""
    made = (reader.graph.works[key] for key in rows["key"].unique(maintain_order=True))
    return list({work.key: work for each in made for work in reader.graph.origins(each, "messages")}.values())


def _conversations(reader: StoreReader, rows: pl.DataFrame) -> dict[str, list[Turn]]:
    found = messages_of(reader, _makers(reader, rows), rows["trace_id"].unique())
    # A rollout that several works have, as a replay does, has its messages once for each.
    parts = found.unique(["trace_id", "message"], maintain_order=True).partition_by("trace_id", as_dict=True)
    return {str(name): turns(own) for (name,), own in parts.items()}


def _tasks(reader: StoreReader, run: str, rows: pl.DataFrame) -> dict[tuple[str, str], Values]:
    """Return the tasks of the examples of some rollouts, as far as the run listed them."""
    wanted = rows.select("environment", "example_id").unique()
    found = reader.frames(run)["examples"].select("environment", "example_id", "task")
    own = found.join(wanted.lazy(), on=["environment", "example_id"], how="semi").collect()
    return {(environment, name): parse_object(task) for environment, name, task in own.iter_rows()}


def _expected_answer(task: Values) -> list[Values]:
    named = {name: task[name] for name in EXPECTED if task.get(name) not in (None, "")}
    fields = named or {name: value for name, value in task.items() if name not in ASKED and value not in (None, "")}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return [{"name": name, **_fold(text, FEW_LINES)} for name, text in texts.items()]


def _replies(
    rows: pl.DataFrame,
    said: Mapping[str, list[Turn]],
    tasks: Mapping[tuple[str, str], Values],
    chosen: Sequence[str],
) -> list[Values]:
    """Return rollouts with what they said; the prompt only where it is another one than that above."""
    found, before = [], None
    for row in rows.to_dicts():
        spoken = said.get(row["trace_id"], [])
        prompt = _messages(spoken[0][0] if spoken else [])
        asked = (row["environment"], row["example_id"], prompt)
        found.append(
            {name: row.get(name) for name in FACTS}
            | {"prompt": None if asked == before else prompt, **_split_reply(spoken, row)}
            | {"expected": _expected_answer(tasks.get(asked[:2], {})), "parts": reward_parts(row["rewards"])}
            | {"beside": _toggle(chosen, row["trace_id"])}
        )
        before = asked
    return found


def _split_reply(spoken: Sequence[Turn], row: Mapping[str, Any]) -> Values:
    """Return the last reply, and all between the prompt and it; both are None or empty where nothing was sampled."""
    last = max((place for place, (_, text) in enumerate(spoken) if text is not None), default=None)
    if last is None:
        return {"earlier": _messages([]), "reply": None}
    earlier: list[dict[str, str]] = []
    for place, (given, text) in enumerate(spoken[: last + 1]):
        earlier += given if place else []
        earlier += [{"role": "assistant", "text": text or ""}] if place < last else []
    # What others than the policy said is there to be looked up.
    lines = LINES if row["trainable"] else 1
    return {"earlier": _messages(earlier), "reply": _fold(spoken[last][1] or "", lines)}


def _messages(spoken: Sequence[Mapping[str, str]]) -> Values:
    """Return the last messages of some, each folded, and how many are left out before them."""
    last = [{"role": each["role"], **_fold(each["text"], FEW_LINES)} for each in spoken[-MOST_MESSAGES:]]
    return {"messages": last, "left_out": len(spoken) - len(last)}


def _fold(text: str, lines: int) -> Values:
    """Return a text in parts: `head`, which is seen, `rest`, which is opened, and how many characters are left out."""
    head = cut("\n".join(text[: LONGEST + 1].split("\n", lines)[:lines]), CHARACTERS)[0]
    rest, left_out = cut(text[len(head) :], LONGEST)
    return {"head": head, "rest": rest.removeprefix("\n"), "left_out": left_out}


def _side_by_side(rows: pl.DataFrame, said: Mapping[str, list[Turn]]) -> list[Values]:
    """Return two replies or more as `text` and `left_out`, the number of characters that are cut."""
    if rows.height < 2:
        return []
    texts = ["\n\n".join(text for _, text in said.get(name, ()) if text is not None) for name in rows["trace_id"]]
    return [
        {name: row.get(name) for name in FACTS} | _cut(text) for row, text in zip(rows.to_dicts(), texts, strict=True)
    ]


def _cut(text: str) -> Values:
    head, left_out = cut(text, LONGEST_BESIDE)
    return {"text": head, "left_out": left_out}


def turns(rows: pl.DataFrame) -> list[Turn]:
    """Return the turns of a trace along its last path from a root to a leaf; `rows` are its `messages`."""
    before: list[dict[str, str]] = []
    done: list[Turn] = []
    for row in _last_path(rows).iter_rows(named=True):
        if row["sampled"]:
            done.append((before, message_text(row)))
            before = []
        else:
            before.append({"role": row["role"], "text": message_text(row)})
    return [*done, (before, None)] if before else done


def conversation(rows: pl.DataFrame) -> list[Values]:
    """Return the messages along the last path of a trace: role, sampled, text and left_out (characters cut)."""
    return [
        {"role": row["role"], "sampled": row["sampled"], **_cut(message_text(row))}
        for row in _last_path(rows).iter_rows(named=True)
    ]


def _last_path(rows: pl.DataFrame) -> pl.DataFrame:
    try:
        paths = branches(rows)
    except BrokenGraph:  # then messages stay as they are numbered
        paths = []
    return rows.filter(pl.col("message").is_in(paths[-1])).sort("message") if paths else rows


def message_text(row: dict[str, Any]) -> str:
    """Return all that a message says as one text: thoughts, parts, calls of tools; an image by its name alone."""
    read = read_message(row, Images(()))
    said = [f"(thoughts)\n{read['thoughts']['text']}"] if read["thoughts"] else []
    said += ["(image)" if part["kind"] == "image" else part["text"]["text"] for part in read["parts"]]
    said += [f"(call) {call['name'] or ''} {call['arguments']['text']}" for call in read["calls"]]
    return "\n".join(said)


def _figures(rows: pl.DataFrame) -> list[Values]:
    """Return the columns by which rollouts can be put in order, the numbers that are not the same in all of them."""
    numeric = [each for each in COLUMNS if each.kind in FIGURES and each.name in rows.columns]
    named = [column(name, rows) for name, _ in named_columns(rows)]
    different = [each for each in numeric if rows[each.name].n_unique() > 1]
    return [{"name": each.name, "title": each.title} for each in (*different, *named[:20])]

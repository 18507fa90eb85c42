"""Rollouts as a person reads them: prompts once, replies under each other, and what was expected."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries.request import PageRequest, parse_object
from flows.queries.rollout_list import COLUMNS
from flows.queries.store_reader import StoreReader
from flows.queries.views import select
from flows.reporting.formats import cut

SIZE, LARGEST = 12, 50
"""Replies of a page; `k` asks for another number."""
LINES, FEW_LINES, CHARACTERS = 12, 4, 1200
"""What is seen of a reply, of what was expected, and of either in one line that does not end."""
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
        "replies": _replies(_with_texts(reader, run, shown), tasks_of(reader, run, shown)),
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


def _with_texts(reader: StoreReader, run: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rollouts with `prompt` and `reply`, as view `rollouts` has them; of others no message is read."""
    lineages = [lineage for lineage in reader.history(run).lineages if lineage.traces.key in {*rows["key"]}]
    where = dict.fromkeys(("traces", "messages"), pl.col("trace_id").is_in(rows["trace_id"].implode()))
    texts = select(reader.frames(), lineages, "select key, trace_id, prompt, reply from rollouts", where)
    return rows.join(texts, on=["key", "trace_id"], how="left", maintain_order="left")


def tasks_of(reader: StoreReader, run: str, rows: pl.DataFrame) -> dict[tuple[str, str], Values]:
    """Return the tasks of the examples of some rollouts, as far as the run listed them."""
    examples = rows.select("environment", "example_id").unique()
    listed = reader.frames(run)["examples"].select("environment", "example_id", "task")
    tasks = listed.join(examples.lazy(), on=["environment", "example_id"], how="semi").collect()
    return {(environment, name): parse_object(task) for environment, name, task in tasks.iter_rows()}


def expected_answer(task: Values) -> dict[str, str]:
    """Return what a task says was expected of a reply: texts by the name of the task's field."""
    filled = {name: value for name, value in task.items() if value not in (None, "")}
    named = {name: filled[name] for name in EXPECTED if name in filled}
    fields = named or {name: value for name, value in filled.items() if name not in ASKED}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}


def _replies(rows: pl.DataFrame, tasks: Mapping[tuple[str, str], Values]) -> list[Values]:
    """Return rollouts with their reply, and with the prompt where it is another one than that above."""
    replies, previous = [], None
    for row in rows.to_dicts():
        example = row["environment"], row["example_id"]
        prompt = None if (*example, row["prompt"]) == previous else _fold(row["prompt"] or "", LINES)
        # What others than the policy said is there to be looked up.
        reply = _fold(row["reply"] or "", LINES if row["trainable"] else 1)
        previous = *example, row["prompt"]
        answer = expected_answer(tasks.get(example, {}))
        expected = [{"name": name, **_fold(text, FEW_LINES)} for name, text in answer.items()]
        told = {"expected": expected, "parts": reward_parts(row["rewards"])}
        replies.append({"set": None, **row, **told, "prompt": prompt, "reply": reply})
    return replies


def _fold(text: str, lines: int) -> Values:
    """Return a text in parts: `head`, which is seen, `rest`, which is opened, and how many characters are left out."""
    head = cut("\n".join(text[: LONGEST + 1].split("\n", lines)[:lines]), CHARACTERS)[0]
    rest, left_out = cut(text[len(head) :], LONGEST)
    return {"head": head, "rest": rest.removeprefix("\n"), "left_out": left_out}

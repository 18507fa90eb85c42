"""Gates that a person opens: what is shown of a batch, and the service of a session that asks and waits."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flows.artifacts import artifact_key, escaped, number
from flows.orchestration.pauses import Paused, told, wait_for_answer
from flows.viewer.texts import cut, visible
from tasks.figures import MEANINGS, Figures
from tasks.gate import Answer, Approve, Question, Shown

LONGEST_TEXT = 1500
"""Characters of a message that are shown."""


def approval(run: str, store: str, tell: Callable[..., None]) -> Approve:
    """Return what asks a person about a batch of `run` through the Prefect flow run around it; see `pauses`.

    `tell` lets those who watch the run see how to answer.
    """
    return partial(_ask, Paused(run, store), tell)


def _ask(paused: Paused, tell: Callable[..., None], question: Question) -> Answer:
    page = summary(paused.run, question)
    told(
        page, artifact_key("gate", paused.run), f"Step {question.step} of run {escaped(paused.run)} waits for approval"
    )
    tell("note", text=f"step {question.step} waits for approval: {answer_command(paused.run, paused.store)}")
    return wait_for_answer(paused, question, page)


def answer_command(run: str, store: str) -> str:
    """Return the command that answers without a browser."""
    return f"stagecoach gate {run} --approve (or --refuse) --store {store}"


def summary(run: str, question: Question) -> str:
    """Return a batch as markdown: its figures, then a few rollouts with their texts."""
    head = [
        f"# {escaped(run)}, step {question.step}: may this batch be trained on?",
        "",
        *figures_table(question.figures),
    ]
    return "\n".join([*head, *(line for shown in question.rollouts for line in _rollout(shown))])


def figures_table(figures: Figures) -> list[str]:
    """Return figures as the lines of a markdown table, each with its meaning."""
    rows = [f"| {escaped(name)} | {number(value)} | {escaped(MEANINGS[name])} |" for name, value in figures.items()]
    return ["| figure | value | what it is |", "|---|---:|---|", *rows]


def _rollout(shown: Shown) -> list[str]:
    lines = ["", f"## {shown.label}: reward {number(shown.reward)} ({escaped(shown.trace_id)})"]
    for role, text in shown.messages:
        head, more = cut(text, LONGEST_TEXT)
        begun = visible(head) + (f" ... ({more} more)" if more else "")
        # An indented block shows a model's text as it is, whatever marks it holds.
        lines += ["", f"{escaped(role)}:", "", *(f"    {line}" for line in begun.split("\n"))]
    return lines


def decision_lines(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return decisions as lines for a terminal, the oldest first; each row carries its step."""
    return [
        f"step {row['step']}: {'approved' if row['approved'] else 'refused'} by {row['decided_by']}"
        f"{': ' + row['reason'] if row['reason'] else ''} ({_brief(row['figures'])})"
        for row in rows
    ]


def _brief(figures: str) -> str:
    found = json.loads(figures)
    return ", ".join(f"{name} {number(found.get(name))}" for name in ("num_traces", "trainable_ratio", "reward_mean"))

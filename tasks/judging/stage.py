"""Judging: asks judges about the rollouts of a step; their scores become a part of the rewards.

Reads examples, traces, messages; writes judgements and traces. Every answer is durable as it comes, so that a stage
that is interrupted asks the rest alone. A rollout without the score of a judge that has a weight is an errored one of
class `unscored`, without a reward: no baseline sees it, and it never counts as 0.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.judges import JudgeConfig
from configs.run import View
from storage.judge_answers import APPROVAL, AnswerTable, JudgeAnswer, JudgeAnswers
from storage.schemas.stage_tables import JUDGEMENTS, TRACES
from tasks.arrays.columns import with_column
from tasks.inference.trace_rows.failures import UNSCORED
from tasks.judging.client import JudgeAddress, JudgeBudgetSpent, JudgeClient, JudgeFailed, question_of
from tasks.judging.questions import prompt_of, read_score
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import Approve, Question, TeacherService, require
from tasks.runtime.stage import Attempt, Stage, Tables

TEXTS = ["trace_id", "message", "role", "content", "sampled"]
CHANGED = ("reward", "rewards", "error_class", "error_type", "error_message")
LOST = "APIConnectionError"
NOTHING = "{}", 0, 0, 0.0, 0.0
"""The response, tokens, cost and seconds of an approval."""
MOST_ROUNDS = 4
"""Times that an engine of the run's own may be lost while it is asked."""


class JudgesUnavailable(RuntimeError):
    """More questions of a step have no score than `max_unscored` allows."""


class JudgeQuestion(NamedTuple):
    """What is asked about a trace."""

    trace_id: str
    digest: str
    prompt: str
    request: Mapping[str, Any]


class Reply(NamedTuple):
    """What came of a question."""

    answer: JudgeAnswer | None
    score: float | None
    error: JudgeFailed | None


@dataclass(frozen=True)
class JudgingInputs:
    """The rollouts of a step with their examples, the answers of the store, and the services."""

    examples: pa.Table
    traces: pa.Table
    messages: pa.Table
    """Texts alone."""
    answers: AnswerTable
    run: str
    step: int
    key: str
    teachers: TeacherService
    approve: Approve

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.table("examples"), attempt.table("traces"), attempt.rows("messages").table(TEXTS)
        services = require(attempt.services.teachers), require(attempt.services.approve)
        context = attempt.context
        return cls(*tables, context.store.answers, context.run, attempt.step, attempt.key, *services)


def judging(inputs: JudgingInputs, config: View) -> Tables:
    """Return a row for each trace and judge, and the traces with the scores among their named rewards.

    Errored traces, and those of other models' seats, are not judged. Raises NotJudgeable before anything is asked,
    JudgesUnavailable where too many questions have no score, and JudgeBudgetSpent; all answers are in the store then.
    """
    planned = [(judge, plan_questions(judge, inputs)) for judge in config.judges]
    rows: list[dict[str, Any]] = []
    for judge, questions in planned:
        replies = _ask_all(judge, questions, inputs)
        _require_enough(judge, replies, inputs)
        rows += _rows(judge, questions, replies, inputs)
    return {"judgements": pa.Table.from_pylist(rows, JUDGEMENTS.arrow), "traces": _add_scores(inputs.traces, rows)}


def plan_questions(judge: JudgeConfig, inputs: JudgingInputs) -> list[JudgeQuestion]:
    """Return what a judge is asked about the traces of its environments, in their order. Raises NotJudgeable."""
    messages: dict[str, list[dict[str, Any]]] = {}
    for row in inputs.messages.sort_by([("trace_id", "ascending"), ("message", "ascending")]).to_pylist():
        messages.setdefault(row["trace_id"], []).append(row)
    tasks = {(row["environment"], row["example_id"]): row["task"] for row in inputs.examples.to_pylist()}
    judged = inputs.traces.filter(pc.and_(pc.is_null(inputs.traces["error_class"]), inputs.traces["trainable"]))
    questions = []
    for trace in judged.select(["trace_id", "environment", "example_id", "info"]).to_pylist():
        if judge.scores(trace["environment"]):
            task = json.loads(tasks[trace["environment"], trace["example_id"]])
            prompt = prompt_of(judge, trace, messages.get(trace["trace_id"], []), task)
            request = {"messages": [{"role": "user", "content": prompt}], **judge.sampling}
            questions.append(JudgeQuestion(trace["trace_id"], question_of(judge, request), prompt, request))
    return questions


def _ask_all(judge: JudgeConfig, questions: Sequence[JudgeQuestion], inputs: JudgingInputs) -> dict[str, Reply]:
    """Return what came of each question, by digest; asks a person where the budget is spent and may be renewed."""
    requests = {question.digest: question.request for question in questions}
    replies: dict[str, Reply] = {}
    num_rounds = 0
    with JudgeAnswers(inputs.answers) as answers:
        while missing := {digest: request for digest, request in requests.items() if digest not in replies}:
            address = JudgeAddress.of(inputs.teachers.serve(judge))  # waits for a restart of an engine
            client = JudgeClient(judge, address, answers, inputs.run, inputs.step)
            try:
                asyncio.run(_ask_missing(client, missing, replies))
            except JudgeBudgetSpent as error:
                _renew_budget(client, error, inputs)
                answers.put(JudgeAnswer(inputs.run, inputs.step, judge.name, APPROVAL, *NOTHING, datetime.now(UTC)))
            answers.flush()  # the next client reads what is spent, and known, from the store
            num_rounds += 1
            lost = [digest for digest, reply in replies.items() if reply.error and reply.error.kind == LOST]
            for digest in lost if judge.path and num_rounds < MOST_ROUNDS else ():
                del replies[digest]
    return replies


async def _ask_missing(
    client: JudgeClient, missing: Mapping[str, Mapping[str, Any]], replies: dict[str, Reply]
) -> None:
    async with client:
        client.load(missing)
        asked = [asyncio.ensure_future(_ask(client, digest, request, replies)) for digest, request in missing.items()]
        # All of them end: what is under way is paid for, and kept.
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if error is not None:
                raise error


async def _ask(client: JudgeClient, digest: str, request: Mapping[str, Any], replies: dict[str, Reply]) -> None:
    """Ask a question until its answer can be read, at most `rereads` times more."""
    read = partial(read_score, parser=client.judge.parser)
    answer, error = None, None
    for _ in range(1 + client.judge.rereads):
        try:
            answer = await client.ask(request, lambda text: read(text) is not None)
            error = JudgeFailed("Unreadable", f"no score of {client.judge.parser.type} within its bounds")
        except JudgeFailed as failure:
            error = failure
            if failure.kind != "Nonsense":
                break
        if answer and (score := read(answer.text)) is not None:
            replies[digest] = Reply(answer, score, None)
            return
    replies[digest] = Reply(answer, None, error)


def _renew_budget(client: JudgeClient, error: JudgeBudgetSpent, inputs: JudgingInputs) -> None:
    """Ask a person whether the budget may be spent once more; raise where it may not."""
    budget, spent = client.judge.budget, client.spent
    todo = (
        f"{client.spent_words()}. Every answer so far is in the store and is not asked for again. To do: raise "
        "judges...budget and resume the run, which asks the rest"
    )
    if budget.on_budget == "pause":
        about = f"another budget of judge {client.judge.name!r}"
        figures = {"answers": spent.calls, "tokens": spent.tokens, "cost": spent.cost}
        key = f"{inputs.key}-{client.judge.name}-{spent.calls}"
        answer = inputs.approve(
            Question(inputs.step, key, figures, (), budget.timeout_seconds, about, "judges.INDEX.budget.on_budget=stop")
        )
        if answer.approved:
            return
        todo = f"{todo}. {answer.by} refused to spend it once more: {answer.reason or 'no reason given'}"
    raise JudgeBudgetSpent(todo) from error


def _require_enough(judge: JudgeConfig, replies: Mapping[str, Reply], inputs: JudgingInputs) -> None:
    errors = [reply.error for reply in replies.values() if reply.error is not None]
    if len(errors) > judge.max_unscored * len(replies):
        ((kind, number), *_) = Counter(error.kind for error in errors).most_common(1)
        example = next(error for error in errors if error.kind == kind)
        raise JudgesUnavailable(
            f"step {inputs.step}: judge {judge.name!r} gave no score for {len(errors)} of {len(replies)} questions; "
            f"max_unscored is {judge.max_unscored:g}. The most frequent reason ({number}): {kind}: {example}. Safe: "
            f"the rollouts and {len(replies) - len(errors)} answers are in the store, and no reward was made up. To "
            "do: resume the run, which asks the rest alone, or raise judges...max_unscored to leave these rollouts out"
        )


def _rows(
    judge: JudgeConfig, questions: Sequence[JudgeQuestion], replies: Mapping[str, Reply], inputs: JudgingInputs
) -> list[dict[str, Any]]:
    rows, counted = [], set[str]()
    for question in questions:
        answer, score, error = replies[question.digest]
        made_here = answer is not None and (answer.run, answer.step) == (inputs.run, inputs.step)
        rows.append(
            {"trace_id": question.trace_id, "judge": judge.name, "weight": judge.weight}
            | {"question": question.digest, "prompt": question.prompt, "score": score}
            | {"answer": answer.text if answer else None, "asked": made_here and question.digest not in counted}
            | {name: getattr(answer, name, 0) for name in ("input_tokens", "output_tokens")}
            | {name: getattr(answer, name, 0.0) for name in ("cost", "seconds")}
            | {"error_type": error.kind if error else None, "error_message": str(error) if error else None}
        )
        counted.add(question.digest)
    return rows


def _add_scores(traces: pa.Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the traces with the scores of judges in their rewards."""
    by_trace: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_trace.setdefault(row["trace_id"], []).append(row)
    now = [
        _score_trace(trace, by_trace.get(trace["trace_id"], []))
        for trace in traces.select(["trace_id", *CHANGED]).to_pylist()
    ]
    for name in CHANGED:
        traces = with_column(traces, name, pa.array([row[name] for row in now], TRACES.arrow.field(name).type))
    return traces


def _score_trace(trace: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not rows:
        return trace
    rewards = json.loads(trace["rewards"])
    if taken := [row["judge"] for row in rows if row["judge"] in rewards]:
        raise ValueError(f"judge {taken[0]!r} has the name of a reward of its environment: give it another name")
    for row in rows:
        rewards[row["judge"]] = None if row["score"] is None else {"score": row["score"], "weight": row["weight"]}
    scored = trace | {"rewards": json.dumps(rewards)}
    if lacking := [row for row in rows if row["score"] is None and row["weight"]]:
        message = f"judge {lacking[0]['judge']}: {lacking[0]['error_message']}"
        error = {"error_class": UNSCORED, "error_type": lacking[0]["error_type"], "error_message": message}
        return scored | {"reward": None} | error
    reward = trace["reward"] or 0.0
    return scored | {"reward": reward + sum(row["score"] * row["weight"] for row in rows if row["weight"])}


STAGE = Stage(
    name="judging",
    version=1,
    reads=("examples", "traces", "messages"),
    writes=("judgements", "traces"),
    sections=("judges",),
    read_inputs=JudgingInputs.read,
    function=judging,
    services=("teachers", "approve"),
)
task = as_task(STAGE)

"""JudgeClient: asks one judge by the OpenAI chat API, and keeps what it answers.

A question that the store has an answer for is not asked. Requests are sent again by the OpenAI library. Callers are the
stage `judging`, in an event loop of its own, and whatever else asks a judge; nothing here knows of stages.
"""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from configs.judges import JudgeConfig
from storage.judge_answers import JudgeAnswer, JudgeAnswers, Spent
from storage.keys import content_key
from tasks.inference.engine.client import ServedModel

ROUTE = "/chat/completions"
MAX_ERROR_CHARS = 500


class JudgeFailed(Exception):
    """A judge gave no answer to a question; `kind` says why in a word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class JudgeBudgetSpent(RuntimeError):
    """The budget of a judge is spent: the question was not sent."""


@dataclass(frozen=True)
class JudgeAddress:
    """Where a judge is asked."""

    url: str
    """The address before `/chat/completions`."""
    key: str
    model: str

    @classmethod
    def of(cls, served: ServedModel) -> Self:
        """Return the address of a served model: its chat API, or that of an engine."""
        return cls(served.chat.url if served.chat else f"{served.url}/v1", served.api_key, served.model)


def question_of(judge: JudgeConfig, request: Mapping[str, Any]) -> str:
    """Return the digest of a question: which model is asked, by its version, and every field of the request."""
    return content_key({"judge": judge.identity, "request": dict(request)})


class JudgeClient:
    """Asks one judge for one step of a run; a context of an event loop."""

    def __init__(self, judge: JudgeConfig, address: JudgeAddress, answers: JudgeAnswers, run: str, step: int) -> None:
        self.judge, self._address = judge, address
        self._answers, self._run, self._step = answers, run, step
        self.spent = answers.table.spent(run).get(judge.name, Spent())
        self._known: dict[str, list[JudgeAnswer]] = {}
        self._open: dict[str, asyncio.Task[JudgeAnswer]] = {}
        self._num_sent = 0
        self._free_at = 0.0
        self._slots = asyncio.Semaphore(judge.max_in_flight)

    async def __aenter__(self) -> Self:
        import httpx
        from openai import AsyncOpenAI

        judge, address = self.judge, self._address
        is_secure = address.url.startswith("https")
        hooks: dict[str, list[Any]] = {"request": [self._wait_turn]}
        self._http = AsyncOpenAI(
            base_url=address.url,
            api_key=address.key or "none",
            max_retries=judge.retries,
            timeout=judge.answer_seconds,
            http_client=httpx.AsyncClient(event_hooks=hooks, trust_env=is_secure, timeout=judge.answer_seconds),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._open.values()]:
            task.cancel()
        await self._http.close()

    def load(self, questions: Collection[str]) -> None:
        """Look for the answers to many questions in the store at once."""
        self._known |= {question: [] for question in questions}
        for answer in self._answers.table.find(questions):
            self._known[answer.question].append(answer)

    async def ask(self, request: Mapping[str, Any], accepts: Callable[[str], bool] = bool) -> JudgeAnswer:
        """Return an answer to a request (messages and sampling fields, without the model).

        One of the store whose text `accepts` takes is returned without asking; otherwise the answer that comes, which
        `accepts` need not take. Who asks the same at the same time gets the same answer. Raises JudgeFailed where none
        comes, JudgeBudgetSpent, and what the store raises.
        """
        question = question_of(self.judge, request)
        if question not in self._known:
            self.load([question])
        for answer in self._known[question]:
            if accepts(answer.text):
                return answer
        if question not in self._open:
            task = asyncio.ensure_future(self._send(question, request))
            self._open[question] = task
            task.add_done_callback(lambda _: self._open.pop(question, None))
        return await asyncio.shield(self._open[question])

    async def _send(self, question: str, request: Mapping[str, Any]) -> JudgeAnswer:
        async with self._slots:
            self._require_budget()
            self._num_sent += 1
            began = time.monotonic()
            try:
                response = await self._post(request)
            finally:
                self._num_sent -= 1
        counts = _count(response, "prompt_tokens"), _count(response, "completion_tokens")
        cost, seconds = self.judge.cost_of(*counts), time.monotonic() - began
        about = self._run, self._step, self.judge.name, question, json.dumps(response)
        answer = JudgeAnswer(*about, *counts, cost, seconds, datetime.now(UTC))
        self._answers.put(answer)
        self.spent.add(*counts, cost)
        self._known[question].append(answer)
        return answer

    async def _post(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from openai import OpenAIError

        body = {"model": self._address.model, **request}
        try:
            response: Any = await self._http.post(ROUTE, body=body, cast_to=object)
        except OpenAIError as error:
            raise JudgeFailed(type(error).__name__, self._words(error)) from error
        except ValueError as error:  # a body that is no JSON
            raise JudgeFailed("Nonsense", self._words(error)) from error
        match response:
            case {"choices": [{"message": {}}, *_]}:
                return {**response}
        raise JudgeFailed("Nonsense", f"the answer is no chat completion: {self._words(response)}")

    def _words(self, error: object) -> str:
        text = " ".join(str(error).split())
        # APIs repeat a key that they refuse.
        return (text.replace(self._address.key, "***") if self._address.key else text)[:MAX_ERROR_CHARS]

    async def _wait_turn(self, _request: Any) -> None:
        if per_minute := self.judge.requests_per_minute:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + 60 / per_minute
            await asyncio.sleep(begin - now)

    def _largest_share(self, more_calls: int = 0) -> float:
        """Return the largest used share of a limit of the budget."""
        budget, spent = self.judge.budget, self.spent
        used = (
            (spent.calls + more_calls, budget.max_calls),
            (spent.tokens, budget.max_tokens),
            (spent.cost, budget.max_cost),
        )
        return max((amount / limit for amount, limit in used if limit), default=0.0)

    def _require_budget(self) -> None:
        if self._largest_share(self._num_sent) >= 1 + self.spent.approvals:
            raise JudgeBudgetSpent(self.spent_words())

    def spent_words(self) -> str:
        """Return what the run has spent on the judge, for a message."""
        counts = f"{self.spent.calls:,} answers, {self.spent.tokens:,} tokens, cost {self.spent.cost:.4g}"
        return f"the budget of judge {self.judge.name!r} is spent: {counts}"


def _count(response: Mapping[str, Any], name: str) -> int:
    """Return a count of tokens; 0 where the API does not say one."""
    usage = response.get("usage")
    count = usage.get(name) if isinstance(usage, Mapping) else 0
    return count if isinstance(count, int) else 0

"""Calls of the engine's bulk route and of the single one, and requests for both."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tasks.inference.engine.client import MODEL, Engine
from tests.fixtures.hosts import KEY

Answer = tuple[int, dict[str, Any]]
NO_HEADERS: Mapping[str, str] = {}


def body(number: int, *, model: str = MODEL, prompt: Sequence[int] = (), **sampling: Any) -> dict[str, Any]:
    """A request with a seed, whose prompt and id are told apart by a number."""
    asked = {"temperature": 1.0, "max_tokens": 12, "logprobs": 1, "seed": number, "detokenize": False, **sampling}
    tokens = list(prompt) or [(number * 17 + index) % 256 for index in range(20)]
    return {"model": model, "request_id": f"request-{number}", "token_ids": tokens, "sampling_params": asked}


def client(engine: Engine, key: str = KEY) -> httpx.Client:
    """A plain client of an engine's routes."""
    return httpx.Client(base_url=engine.url, headers={"Authorization": f"Bearer {key}"}, timeout=120, trust_env=False)


@contextmanager
def bulk_lines(
    engine: Engine, bodies: Sequence[Any], headers: Mapping[str, str] = NO_HEADERS
) -> Iterator[Iterator[str]]:
    """The lines of one bulk call as they come; the call is left at the end of the block."""
    asked = {"json": {"requests": bodies}, "headers": dict(headers)}
    with client(engine) as http, http.stream("POST", "/inference/v1/generate_many", **asked) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        yield answer.iter_lines()


def answers_in_bulk(engine: Engine, bodies: Sequence[Any]) -> list[Answer]:
    """The answers of one bulk call in the order of the requests: each has one."""
    with bulk_lines(engine, bodies) as lines:
        found = {index: (status, without_time(content)) for index, status, content in map(json.loads, lines)}
    assert sorted(found) == list(range(len(bodies)))
    return [found[index] for index in range(len(bodies))]


def single_answers(engine: Engine, bodies: Sequence[Any]) -> list[Answer]:
    """The answers of the single route, asked for one after the other."""
    with client(engine) as http:
        answers = [http.post("/inference/v1/generate", json=each) for each in bodies]
    return [(each.status_code, without_time(each.json())) for each in answers]


def without_time(content: dict[str, Any]) -> dict[str, Any]:
    """An answer without the second in which it was given."""
    return {key: value for key, value in content.items() if key != "created"}


def tokens_and_logprobs(answers: Sequence[Answer]) -> tuple[list[list[int]], list[float]]:
    """The tokens of each answer, and the log-probs of all, read as the environments' client reads them."""
    from renderers.client import _parse_completion_logprobs, parse_generate_response

    tokens, logprobs = [], []
    for status, content in answers:
        assert status == 200, content
        (choice,) = parse_generate_response(json.dumps(content).encode())["choices"]
        tokens.append(choice["token_ids"])
        logprobs += _parse_completion_logprobs(choice, choice["token_ids"])
    return tokens, logprobs

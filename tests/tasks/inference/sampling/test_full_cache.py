"""Rollouts before a real engine whose cache holds few of them: what it preempts is computed again, and is exact."""

import asyncio

import httpx
import pytest

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import parse_page, read_page
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.faults import happened
from tests.fixtures.hosts import ENGINE, KEY, engine_of
from tests.fixtures.waiting import PATIENCE

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
MOST, NUM_TOKENS = 16, 230
"""The cache has room for four rollouts of so many tokens: 2 MiB, and 2 KiB a token."""


async def ask_together(served):
    """Return the choices of rollouts that are under way together."""

    async def ask(client, number):
        sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        body = {"model": served.model, "token_ids": [number], "sampling_params": sampling}
        answer = await client.post("/inference/v1/generate", json=body)
        return {"prompt": number, **answer.raise_for_status().json()["choices"][0]}

    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=PATIENCE) as client:
        return await asyncio.gather(*(ask(client, 1 + number) for number in range(MOST)))


@pytest.mark.fault(
    "services",
    "an engine's cache is too small for the rollouts",
    "some are computed again, none is lost or changed",
)
def test_what_was_preempted_is_exact(tmp_path):
    small = ENGINE.model_copy(update={"memory_gib": 2 / 1024})
    weights = tiny_qwen3(tmp_path / "weights")
    with engine_of(weights, tmp_path / "engine.json", small, metrics=True) as engine:
        served = ServedModel(engine.url, KEY)
        answers = asyncio.run(ask_together(served))
        counters, *_ = parse_page(read_page(served.url, served.api_key) or "")
        preemptions = sum(value for (name, _), value in counters.items() if name == "preemptions")
        assert preemptions > 0
        happened(f"{preemptions:.0f} preemptions")
        for answer in answers:
            assert len(answer["token_ids"]) == NUM_TOKENS
            given = [entry["logprob"] for entry in answer["logprobs"]["content"]]
            afresh = engine.score([answer["prompt"], *answer["token_ids"]], salt="afresh")[1:]
            assert given == pytest.approx(afresh, abs=1e-4)

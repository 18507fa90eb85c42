"""Rollouts in flight before a real engine whose cache holds few of them: what it preempts makes the limit fall.

What was preempted is computed again, and so is checked: its log-probs are those that the engine gives afterwards.
"""

import asyncio

import httpx
import pytest

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import read_page
from tasks.inference.sampling.limits import INITIAL_LIMIT, AdaptiveLimit, Limiter
from tasks.inference.sampling.load_meter import follow_loads, load_of_page
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.faults import happened
from tests.fixtures.hosts import ENGINE, KEY, engine_of
from tests.fixtures.waiting import PATIENCE

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
MOST, NUM_TOKENS = 32, 230
FIT = 4
"""Rollouts of so many tokens for which the cache has room: 2 MiB, and 2 KiB a token."""


class Crowd:
    """Asks for rollouts, as many at a time as the limit lets it, until the limit has fallen to those that fit."""

    def __init__(self, engine):
        self.served = ServedModel(engine.url, KEY)
        self.limiter = Limiter(MOST)
        self.adaptive = AdaptiveLimit(self.limiter)
        self.limits = [self.limiter.limit]
        self.answers = []

    async def ask(self, client, number):
        """Sample one rollout after another."""
        sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        while self.limiter.limit > FIT:
            async with self.limiter:
                body = {"model": self.served.model, "token_ids": [number], "sampling_params": sampling}
                answer = await client.post("/inference/v1/generate", json=body)
                self.answers.append({"prompt": number, **answer.raise_for_status().json()["choices"][0]})

    def adjust(self, load):
        self.adaptive.adjust(load)
        self.limits.append(self.limiter.limit)

    async def gather(self):
        """Return the engine's load when all are answered."""
        steering = asyncio.create_task(follow_loads(lambda: [self.served], self.adjust))
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self.served.url, headers=headers, timeout=PATIENCE) as client:
            await asyncio.gather(*(self.ask(client, 1 + number) for number in range(MOST)))
        steering.cancel()
        return load_of_page(read_page(self.served) or "")


@pytest.mark.fault(
    "services", "an engine's cache is too small for the rollouts", "fewer at a time, and none is lost or changed"
)
def test_the_limit_falls_to_what_fits_and_what_was_preempted_is_exact(tmp_path):
    small = ENGINE.model_copy(update={"memory_gib": 2 / 1024})
    weights = tiny_qwen3(tmp_path / "weights")
    with engine_of(weights, tmp_path / "engine.json", small, metrics=True) as engine:
        crowd = Crowd(engine)
        load = asyncio.run(crowd.gather())
        assert load and load.preemptions > 0 and load.running == load.waiting == 0
        happened(f"{load.preemptions:.0f} preemptions")
        assert crowd.limits[0] == INITIAL_LIMIT and crowd.limits[-1] <= FIT
        assert len(crowd.answers) >= MOST
        for answer in crowd.answers[:INITIAL_LIMIT]:  # those that were under way together
            assert len(answer["token_ids"]) == NUM_TOKENS
            given = [entry["logprob"] for entry in answer["logprobs"]["content"]]
            afresh = engine.score([answer["prompt"], *answer["token_ids"]], salt="afresh")[1:]
            assert given == pytest.approx(afresh, abs=1e-4)

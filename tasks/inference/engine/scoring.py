"""Scoring: what a served model gives the tokens of sequences that others sampled."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.inference.engine.client import MODEL, Engine

if TYPE_CHECKING:
    from configs.evaluation import ExternalModelConfig

SCORE_SECONDS = 600.0
"""Longest wait for one sequence: those before it in the engine's queue are waited for too."""


class NotScorable(ValueError):
    """Rollouts cannot be scored by a reference as they are."""


@dataclass(frozen=True)
class ServedModel:
    """A model that somebody serves: where, how to call it, and under which salt its states are cached."""

    url: str
    api_key: str = field(repr=False)
    model: str = MODEL
    """The name under which it is served."""
    salt: str = ""
    """What its weights are known by: a prefix cache shares states only within one salt."""
    chat: "ExternalModelConfig | None" = None
    """Where someone else serves it with a chat API alone: it gives text and no tokens, and is only ever evaluated."""


def score(
    served: ServedModel, sequences: Sequence[Sequence[int]], max_in_flight: int
) -> Iterator[tuple[int, list[float]]]:
    """Yield the place of each sequence, and the log-prob of each of its tokens given those before, as they come.

    In nats, at temperature 1; that of the first token is 0.0. A sequence has at least two tokens. At most
    `max_in_flight` requests are under way. Raises EngineLost where the engine is gone, EngineError where it refuses a
    sequence; what was yielded before stands.
    """
    engine = Engine(served.url, served.api_key, timeout=SCORE_SECONDS, model=served.model)
    with closing(engine), ThreadPoolExecutor(max_in_flight, thread_name_prefix="score") as threads:
        waiting = iter(enumerate(sequences))
        running = {}
        try:
            while True:
                for place, tokens in waiting:
                    running[threads.submit(engine.score, list(tokens), served.salt)] = place
                    if len(running) == max_in_flight:
                        break
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

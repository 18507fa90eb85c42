"""Scores sequences with a served model: the log-probs that it gives tokens which another model sampled."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.inference.engine.client import MODEL, Engine

if TYPE_CHECKING:
    from configs.evaluation import ExternalModelConfig

SCORE_SECONDS = 600.0
"""Longest wait for one sequence, including those before it in the engine's queue."""


class NotScorable(ValueError):
    """Rollouts cannot be scored by a reference model."""


@dataclass(frozen=True)
class ServedModel:
    """A model that is served somewhere: its address, name, and cache salt."""

    url: str
    api_key: str = field(repr=False)
    model: str = MODEL
    """The name under which it is served."""
    salt: str = ""
    """Identifies its weights: a prefix cache shares states only within one salt."""
    chat: "ExternalModelConfig | None" = None
    """Set for an external model with a chat API alone: it returns text and no tokens, and can only be evaluated."""


def score(
    served: ServedModel, sequences: Sequence[Sequence[int]], max_in_flight: int
) -> Iterator[tuple[int, list[float]]]:
    """Yield the index of each sequence with its tokens' log-probs given those before, in order of completion.

    In nats, at temperature 1; the first token's is 0.0. A sequence has at least two tokens. At most
    `max_in_flight` requests are under way. Raises EngineLost where the engine is gone, EngineError where it refuses a
    sequence; what was yielded before is valid.
    """
    engine = Engine(served.url, served.api_key, timeout=SCORE_SECONDS, model=served.model)
    with closing(engine), ThreadPoolExecutor(max_in_flight, thread_name_prefix="score") as threads:
        remaining = iter(enumerate(sequences))
        running = {}
        try:
            while True:
                for index, tokens in remaining:
                    running[threads.submit(engine.score, list(tokens), served.salt)] = index
                    if len(running) == max_in_flight:
                        break
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

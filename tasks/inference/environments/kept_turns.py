"""Rollouts of this process whose turns are kept: what the engine answers goes to the sampler at once.

A rollout that is played again is given what was answered before. The engine is not asked again where the request is the
same: the tokens of the prompt, the sampling parameters with their seed, and the name of the model. Which weights
sampled an answer is the sampler's concern.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ABORTED = b'"finish_reason":"abort"'
_rollouts: dict[str, "KeptRollout"] = {}
"""By the ids of their traces."""


class KeptRollout:
    """A rollout whose turns are kept."""

    def __init__(self, known: Mapping[str, str], send: Callable[[Mapping[str, str]], None]) -> None:
        """`known` are answers by request; `send` takes each further turn."""
        self._known = known
        self._send = send
        self._traces: list[str] = []

    def claim(self, trace: Any) -> None:
        """Take the model calls of a trace that begins for this rollout's."""
        self._traces.append(trace.id)
        _rollouts[trace.id] = self

    def recall(self, request: str) -> bytes | None:
        """Return what was answered to a request before, given by its digest; None where it was not asked."""
        known = self._known.get(request)
        return None if known is None else known.encode()

    def keep(self, request: str, model: str, answer: bytes) -> None:
        """Send the answer of a model to a request, unless an engine that was ended has cut it off."""
        if ABORTED not in answer:
            self._send({"request": request, "model": model, "answer": answer.decode()})

    def release(self) -> None:
        """Forget the traces of a rollout that has ended."""
        for each in self._traces:
            _rollouts.pop(each, None)


def digest(body: Mapping[str, Any]) -> str:
    """Return the digest of a request, the salt of its cache left out: another policy has another one."""
    from pydantic_core import to_json

    return hashlib.sha256(to_json({name: body[name] for name in sorted(body) if name != "cache_salt"})).hexdigest()


def turns_of(session: str) -> KeptRollout | None:
    """Return the rollout that a trace belongs to; None where its turns are not kept."""
    return _rollouts.get(session)


@contextmanager
def kept_rollout(known: Mapping[str, str] | None, send: Callable[[Mapping[str, str]], None]) -> Iterator[Any]:
    """Yield the function that claims each trace of a rollout, where its turns are kept; None where they are not."""
    if known is None:
        yield None
        return
    rollout = KeptRollout(known, send)
    try:
        yield rollout.claim
    finally:
        rollout.release()

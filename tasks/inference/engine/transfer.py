"""WeightTransfer: one policy on its way from the learner's memory to one engine, by vLLM's weight transfer.

The learner sends tensors to the engine's workers. Routes of the engine's server are called here on its behalf, in the
thread of the flow that loads the policy, and each moves the transfer on by a state:

    idle       the engine serves what it served
    announced  it is paused, the tokens of its requests are counted, and it names no policy
    receiving  its workers take tensors in place of those that they hold
    loaded     they have taken all, which nothing has proven
    proven     their checksum is that of the policy

One that fails goes back to idle, with the engine ready for the policy's files, where it still answers; an engine that
does not is started again, and has the policy in a new transfer. The learner's process may end in any state.
"""

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from typing import Any

from tasks.inference.engine.checks import EngineMismatch
from tasks.inference.engine.client import Engine, EngineError

_log = logging.getLogger(__name__)
Call = Callable[[str, Mapping[str, Any]], None]
"""Calls a route of the engine by its name, with its content."""


class State(StrEnum):
    """How far a transfer is."""

    IDLE = auto()
    ANNOUNCED = auto()
    RECEIVING = auto()
    LOADED = auto()
    PROVEN = auto()


AFTER = {"start_weight_update": State.RECEIVING, "finish_weight_update": State.LOADED}
"""The states that follow the calls of two routes."""


class TransferFailed(RuntimeError):
    """The learner did not send a policy that it has."""


class WeightTransfer:
    """The transfer of a policy to an engine, which is idle at first."""

    def __init__(self, engine: Engine, send: Callable[[str, Call], bool] | None, workers: int = 1) -> None:
        """`send` has the learner send to the engine at a URL (`LearnerProcess.send_weights`); None: it never does."""
        self._engine, self._send, self._workers = engine, send, workers
        self.state = State.IDLE
        self._calling = ""

    def receive(self) -> bool:
        """Have the paused engine take the policy from the learner; False where its files are to be loaded.

        Raises EngineLost where the engine is gone, and EngineError where it cannot take back what it has begun.
        """
        if not self._send:
            return False
        self.enter(State.ANNOUNCED)
        try:
            if self._send(self._engine.url, self._call):
                return True
        except (TransferFailed, EngineError) as error:
            _log.warning("a policy was not transferred and is loaded from its files (it was %s): %s", self.state, error)
            if self.state is State.RECEIVING:
                self._take_back()
        self.enter(State.IDLE)
        return False

    def _take_back(self) -> None:
        """End the update: layers that have some of their tensors would take the rest from the files and no other."""
        if self._calling == "update_weights":  # vLLM has ended it
            if self._workers > 1:  # of which vLLM 0.31 reads one's error, and the others' later as answers
                raise EngineError(
                    f"the {self._workers} workers of the engine at {self._engine.url} failed to take a policy, and "
                    "vLLM cannot go on with several then. What is in the store is safe: resume the run, which "
                    "starts it anew"
                )
            self._engine.call("start_weight_update", {})
        self._engine.call("finish_weight_update", {})

    def prove(self, same: bool) -> None:
        """Go on from loaded to proven where the checksum is `same` as the learner's.

        Raises EngineMismatch where it could not be compared.
        """
        if self.state is not State.LOADED:
            return
        if not same:
            raise EngineMismatch("no checksum proves the transferred weights; set engine.weight_transfer=file")
        self.enter(State.PROVEN)

    def enter(self, state: State) -> None:
        """Go on to a state."""
        self.state = state

    def _call(self, route: str, content: Mapping[str, Any]) -> None:
        self._calling = route
        self._engine.call(route, content)
        self._calling = ""
        if state := AFTER.get(route):
            self.enter(state)

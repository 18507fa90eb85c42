"""The blocking client of the learner's process; imports no torch."""

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from tasks.learner import wire
from tasks.learner.errors import BY_NAME, LearnerError, LearnerLost

__all__ = ["Learner", "LearnerError", "LearnerLost"]


class Learner:
    """One connection to the learner. Requests of several clients are served in turn, never side by side."""

    def __init__(self, address: str, *, connect_seconds: float = 30.0) -> None:
        """Connect to `address`, "host:port" out of the worker's report. Raises LearnerLost when nobody listens."""
        host, _, port = address.rpartition(":")
        self.address = address
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=connect_seconds)
        except OSError as error:
            raise LearnerLost(f"no learner answers at {address}: {error}; start it again and load a policy") from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def configure(self, training: dict[str, Any], learner: dict[str, Any]) -> None:
        """Give the learner its sections, as plain values of TrainingConfig and LearnerConfig.

        Another training section than before makes the learner forget its policy: load one afterwards.
        """
        self._ask("configure", training=training, learner=learner)

    def load(self, policy_key: str, directory: str, fresh_optimizer: bool, base: str = "") -> None:
        """Load the weights in `directory`, and the optimizer state beside them unless `fresh_optimizer`.

        Where an adapter is there, `base` is the directory of the weights that it is laid over.

        Raises NoOptimizerState when there is none and a fresh one was not asked for, LearnerError for a directory that
        is not a complete model.
        """
        named = {"policy_key": policy_key, "directory": directory, "base": base}
        self._ask("load", **named, fresh_optimizer=fresh_optimizer)

    def train(
        self,
        batches: pa.Table,
        *,
        step: int,
        policy_key_in: str,
        policy_key_out: str,
        directory_out: str,
        save_optimizer: bool,
    ) -> tuple[list[dict[str, Any]], pa.Table]:
        """Make an optimizer step for each `update` of the packed rows and write the policy made into `directory_out`.

        `directory_out` must be absent or empty; it is complete and synced to disk when this returns, and worth nothing
        when this raises. Returns the rows of `updates`, with `metrics` as a dictionary, and the table
        `token_statistics` with the column `masked` of `token_masks`.
        """
        updates, statistics = self._ask(
            "train",
            batches,
            step=step,
            policy_key_in=policy_key_in,
            policy_key_out=policy_key_out,
            directory_out=directory_out,
            save_optimizer=save_optimizer,
        )
        assert statistics is not None
        return updates, statistics

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token given those before it at temperature 1, in nats; the first is 0.0."""
        answer, _ = self._ask("probe", token_ids=[int(token) for token in token_ids])
        return list(answer["logprobs"])

    def state(self) -> dict[str, Any]:
        """Return what the learner holds: policy_key (null: none), step, weights_sha256, pid and its versions."""
        answer, _ = self._ask("state")
        return dict(answer)

    def close(self) -> None:
        """Close the connection; the learner keeps its policy."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: str, table: pa.Table | None = None, **arguments: Any) -> tuple[Any, pa.Table | None]:
        try:
            wire.send(self._socket, {"request": request, "arguments": arguments}, table)
            answer, answer_table = wire.receive(self._socket)
        except (OSError, EOFError) as error:
            self.close()
            raise LearnerLost(
                f"the learner at {self.address} went away during {request!r} ({error}): published policies are safe, "
                "its memory is lost; connect to the restarted one and load a policy"
            ) from error
        if "error" in answer:
            raise BY_NAME.get(answer["error"], LearnerError)(answer["message"])
        return answer["result"], answer_table

"""The client side of the learner: the command that starts its process, and a blocking connection. Imports no torch."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from configs.services import LearnerConfig
from tasks.learner import protocol
from tasks.learner.protocol import RENDEZVOUS, BatchReference, LearnerError, LearnerLost
from tasks.runtime.process_variables import module_command

__all__ = ["Learner", "LearnerError", "LearnerLost", "command"]

ENVIRONMENT = {
    # Idle OpenMP threads that spin burn ten times the CPU time on a shared machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Policies are directories; a name that is not one must fail, not reach for a network.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Needed on CUDA for the same batches to give the same weights.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Else FlashAttention 4 compiles its kernels anew at each start.
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}

KEEPALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 6,
}
"""Options of a connection that ends after 90 s without a sign of life of the other machine, whatever a process does."""


def command(learner: LearnerConfig, report: str, node: int = 0) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and the extra environment of the learner's processes on one of its nodes.

    The process writes {"address": "HOST:PORT", "pulse": "HOST:PORT", "pid": N} to the file `report` once it answers.
    `pulse` is the address of its progress monitor (tasks.learner.pulse). HOST is 127.0.0.1, or what BIND of
    tasks.runtime.process_variables says, where protocol.KEY_VARIABLE must give it a key. Where its standard input is a
    pipe, it ends when that closes.
    """
    return ranks_command(learner, node, "tasks.learner.worker", "--report", report)


def ranks_command(learner: LearnerConfig, node: int, module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and the extra environment of a module that runs in each of the learner's processes."""
    variables = ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": learner.gpus} if learner.gpus else {})
    if learner.num_ranks > 1:
        if learner.nodes == 1:  # else gloo listens where the machine's name leads
            variables |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        # It starts the ranks without -P.
        variables |= {"PYTHONSAFEPATH": "1"}
        launched = [*_rendezvous(learner, node), "-m", module, *arguments]
        return module_command("tasks.learner.launcher", *launched), variables
    return module_command(module, *arguments), variables


def _rendezvous(learner: LearnerConfig, node: int) -> list[str]:
    """Return torchrun's arguments. Ranks come in the order of nodes: rank 0, which answers, is on node 0.

    A rank that is lost ends them all, and whoever started them starts them again.
    """
    meeting = learner.rendezvous if learner.nodes > 1 else "127.0.0.1:0"
    numbers = [f"--nnodes={learner.nodes}", f"--nproc-per-node={learner.processes}", "--max-restarts=0"]
    # Without one it would wait for ten minutes.
    settings = f"rank={node},timeout={max(1, round(learner.startup_seconds))}"
    return [*numbers, f"--rdzv-backend={RENDEZVOUS}", f"--rdzv-endpoint={meeting}", f"--rdzv-conf={settings}"]


def _connect(host: str, port: int, key: str, seconds: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=seconds)
    try:
        protocol.introduce(connection, key)
    except OSError:
        connection.close()
        raise
    return connection


class Learner:
    """One blocking connection to the learner. Requests of several clients are served one after another."""

    def __init__(self, address: str, key: str = "", *, connect_seconds: float = 30.0) -> None:
        """Connect to `address`, "host:port" from the worker's report, with the learner's key if it has one.

        Raises LearnerLost where no process listens, or one that has another key.
        """
        host, _, port = address.rpartition(":")
        self.address = address
        try:
            self._socket = _connect(host, int(port), key, connect_seconds)
        except OSError as error:
            raise LearnerLost(f"no learner answers at {address}: {error}; start it again and load a policy") from error
        # A step may take hours; one that hangs is found by the pulse and not by a timeout.
        self._socket.settimeout(None)
        # A machine that is gone says nothing for ever: its silence to the kernel's questions ends the connection.
        for option, value in KEEPALIVE.items():
            self._socket.setsockopt(*option, value)
        # Requests are short and wait for an answer: the kernel must not hold them back to fill a packet.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def configure(self, training: dict[str, Any], learner: dict[str, Any]) -> None:
        """Send the learner its config sections, as plain values of TrainingConfig and LearnerConfig.

        Another training section than before makes the learner forget its policy: load one afterwards.
        """
        self._ask("configure", training=training, learner=learner)

    def load(
        self, policy_key: str, directory: str, fresh_optimizer: bool, base: str = "", state_directory: str = ""
    ) -> None:
        """Load the weights in `directory`, and the optimizer state beside them unless `fresh_optimizer`.

        Where the directory holds an adapter, `base` is the directory of the weights below it. With a `state_directory`
        the state is what was kept there, see `train`.

        Raises NoOptimizerState when there is none and a fresh one was not asked for, LearnerError for a directory that
        is not a complete model.
        """
        named = {"policy_key": policy_key, "directory": directory, "base": base}
        named |= {"state_directory": state_directory} if state_directory else {}
        self._ask("load", **named, fresh_optimizer=fresh_optimizer)

    def train(
        self,
        batch: BatchReference,
        *,
        step: int,
        policy_key_in: str,
        policy_key_out: str,
        directory_out: str,
        save_optimizer: bool,
        state_directory: str = "",
        labels: Mapping[str, tuple[str, float]] | None = None,
    ) -> list[dict[str, Any]]:
        """Make an optimizer step for each `update` of the packed rows and write the new policy into `directory_out`.

        The learner reads the rows of `batch` itself, each rank its own. `directory_out` must be absent or empty; it is
        complete and synced to disk when this returns, and not usable when this raises. Beside the policy lies
        `protocol.STATISTICS_FILE`: the table `token_statistics` with the column `masked` of `token_masks`, in Arrow's
        IPC format, for the caller to take away. Returns the rows of `updates`, with `metrics` as a dictionary.

        Raises what reading rows from the store raises, besides LearnerError and LearnerLost.

        Where optimizer state is not saved and a `state_directory` is given, weights and state are written there while
        the caller goes on, for a learner that is started again. `labels` are those of `tasks.learner.preferences`.
        """
        updates = self._ask(
            "train",
            batch=batch.to_json(),
            step=step,
            policy_key_in=policy_key_in,
            policy_key_out=policy_key_out,
            directory_out=directory_out,
            save_optimizer=save_optimizer,
            state_directory=state_directory,
            **({"labels": labels} if labels else {}),
        )
        return list(updates)

    def send_weights(self, call: Callable[[str, Mapping[str, Any]], None], **target: Any) -> None:
        """Send the policy `policy_key` to an engine: see `weight_sender.WeightSender.send` for the other arguments.

        Meanwhile `call` is called for the routes of the engine's server that the learner names, with their contents.
        What it raises ends the transfer and the connection, and is raised.
        """
        answer = self._exchange("send_weights", {"request": "send_weights", "arguments": target})
        with ExitStack() as failed:
            failed.callback(self.close)  # the learner waits for the call's end on this connection
            while "call" in answer:
                call(*answer["call"])
                answer = self._exchange("send_weights", {})
            failed.pop_all()
        _result(answer)

    def release(self) -> None:
        """Give back what memory of a GPU the learner holds beyond weights and optimizer state."""
        self._ask("release")

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token given those before it at temperature 1, in nats; the first is 0.0."""
        answer = self._ask("probe", token_ids=[int(token) for token in token_ids])
        return list(answer)

    def state(self) -> dict[str, Any]:
        """Return policy_key (None: no policy is loaded), step, weights_sha256, pid and versions of the learner."""
        answer = self._ask("state")
        return dict(answer)

    def close(self) -> None:
        """Close the connection; the learner keeps its policy."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: str, **arguments: Any) -> Any:
        return _result(self._exchange(request, {"request": request, "arguments": arguments}))

    def _exchange(self, request: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            protocol.send(self._socket, message)
            return protocol.receive(self._socket)
        except (OSError, EOFError) as error:
            self.close()
            raise LearnerLost(
                f"the learner at {self.address} went away during {request!r} ({error}): published policies are safe, "
                "its memory is lost; connect to the restarted one and load a policy"
            ) from error


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise protocol.error_of(answer)
    return answer["result"]

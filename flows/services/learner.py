"""LearnerProcess: the learner's process, which holds any recorded policy, optimizer state included, also after a loss.

It is started early and waited for late, and never returned while its weights are not the recorded ones. Where the
optimizer state of a policy was not saved, LearnerRecovery trains recorded batches again. LearnerNode: the processes of
a learner on a machine of a pool. Caller: the stage training, in the thread of the flow (LearnerService).
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path

from configs.run import RunConfig
from flows.services.base import Command, RunService, Supervisor
from flows.services.learner_recovery import LearnerRecovery
from flows.services.memory import tensor_parallel
from flows.services.pools import STAND_IN_NEEDS, address_of, shared_key, stand_in
from flows.services.process import Report, ServiceFailed, ServiceSpec
from tasks.inference.engine.transfer import Call, TransferFailed
from tasks.learner import client as learner_service
from tasks.learner import pulse
from tasks.learner.client import Learner
from tasks.learner.protocol import KEY_VARIABLE, LearnerError, LearnerLost
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy

NEEDS = ("AWS_*",)
"""It reads packed rows from the store, which may be in S3."""
READY_SECONDS = 2.0
"""Longest wait for a starting learner's answer, before it is asked again."""


class LearnerProcess(RunService):
    """The learner's process, which loads any recorded policy, its optimizer state included."""

    deployment = "serve/learner"

    def __init__(
        self,
        supervisor: Supervisor,
        context: RunContext,
        engine_asleep: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`engine_asleep` keeps the engine from the GPU that both have, where there is no room for both."""
        super().__init__(supervisor, context.config)
        self._context = context
        self._engine_asleep = engine_asleep
        self._learner: tuple[int, Learner] | None = None
        self._at_work = threading.Lock()
        """Held in a turn and while a policy is sent."""
        self._sending = threading.Lock()
        """Held while a policy is sent, or about to be: replicas have it one after another."""
        self._answered: Report = {}
        """Report of the generation that was last seen to answer."""
        training, learner = self._config.training, self._config.learner
        self._sections = training.model_dump(mode="json"), learner.model_dump(mode="json")

    @cached_property
    def state_directory(self) -> str:
        """Where the learner keeps optimizer state that is not saved; empty where it keeps none."""
        memory = self._config.learner.memory_directory
        if not self._config.learner.keep_state or self._config.training.save_optimizer_every == 1:
            return ""
        if not Path(memory).is_dir():
            raise ServiceFailed(
                f"learner.memory_directory: {memory} is no directory of this machine. Nothing was trained; name one, "
                "for example /dev/shm, or leave it empty"
            )
        return str(self.supervisor.scratch_in(Path(memory)))

    def begin(self) -> None:
        """Start the learner; returns at once."""
        self._process("learner", self._spec)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block the learner may take what memory its GPU has; afterwards it keeps its state alone."""
        with self._engine_asleep(), self._at_work:
            yield
            # One that is gone has given everything back.
            with suppress(LearnerLost):
                if self._learner is not None:
                    self._learner[1].release()

    def send_weights(self, policy: Policy, engine: str, call: Call) -> bool:
        """Send `policy` to the engine at a URL by the backend of `engine.weight_transfer`.

        The learner calls routes of the engine by `call` meanwhile. False where it does not hold the policy, or has a
        turn: nobody waits for that. Raises what `call` raises, and TransferFailed where the learner cannot send it.
        """
        with self._sending:
            return self._send(policy, engine, call)

    def _send(self, policy: Policy, engine: str, call: Call) -> bool:
        handle = self._handles.get("learner")
        report = handle and handle.ready_now()
        if not report or not self._at_work.acquire(blocking=False):
            return False
        try:
            with Learner(report["address"], self._key) as learner:
                holds: bool = learner.state()["policy_key"] == policy.key
                if holds:
                    section = self._config.engine
                    target = {"policy_key": policy.key, "backend": section.weight_transfer, "target": engine}
                    learner.send_weights(call, **target, workers=tensor_parallel(section.extra_arguments))
                return holds
        except (LearnerError, LearnerLost) as error:
            raise TransferFailed(str(error)) from error
        finally:
            self._at_work.release()

    def restore(self, policy: Policy) -> Learner:
        """Return a learner that holds the weights and the optimizer state of `policy`.

        Where no optimizer state was saved, the recorded batches since the last one that was are trained again.
        Raises LearnerLost when it dies on the way, ServiceFailed when no restart is left, and WeightsDiffer when
        training again does not give the recorded weights.
        """
        learner = self._connect()
        # The learner of a run that continues mostly holds it already, and loading is the slow part.
        if learner.state()["policy_key"] != policy.key:
            LearnerRecovery(learner, self._context, self._sections, self.state_directory).recover(policy)
        return learner

    def load_fresh(self, policy: Policy, directory: Path) -> Learner:
        """Return a learner that holds the weights in `directory` as `policy`, with no optimizer state."""
        learner = self._connect()
        learner.load(policy.key, str(directory), fresh_optimizer=True)
        return learner

    def _connect(self) -> Learner:
        handle = self._process("learner", self._spec)
        while True:
            generation = handle.generation  # read first: a restart in between then shows as a lost learner
            report = handle.wait()  # returns after a restart, or raises when none is left
            try:
                if self._learner is None or self._learner[0] != generation:
                    learner = Learner(report["address"], self._key)
                    learner.configure(*self._sections)
                    self._learner = generation, learner
                self._learner[1].state()
                return self._learner[1]
            except LearnerLost:
                self._learner, self._answered = None, {}  # asked again first: its guardian may be slow to see it gone

    @property
    def _key(self) -> str:
        """The key that a learner of another machine and its callers must know; empty where it is on this one."""
        return shared_key(self._config, "learner") if self._on_pools else ""

    def _spec(self) -> ServiceSpec:
        section = self._config.learner
        return self._describe(
            "learner",
            lambda report: learner_service.command(section, str(report)),
            self._ready,
            section,
            ("learner", "1", ""),
            needs=NEEDS,
            hangs=lambda report: pulse.hangs(report["pulse"], section.hang_seconds, self._key),
            startup_seconds=section.startup_seconds,
        )

    def _ready(self, report: Report) -> bool:
        """Return whether a generation answers; one that did is not asked again, as it may hang by now.

        The request that follows ends when the process is ended; not being ready would end the run.
        """
        if report != self._answered:
            pulse.ask(report["pulse"], READY_SECONDS, self._key)
            self._answered = report
        return True


class LearnerNode(RunService):
    """The processes of a learner on one machine of a pool; the first node asks Prefect for the other ones.

    So the run has one flow run to wait for and to watch. When a node ends, the first one does, and all with it.
    """

    def __init__(self, supervisor: Supervisor, config: RunConfig, node: int, meeting: str) -> None:
        """`meeting` is where the first node waits for this one, as HOST:PORT; empty on the first one itself."""
        super().__init__(supervisor, config)
        self._node = node
        self._key = shared_key(config, "learner")
        self._meeting = meeting
        if config.learner.nodes > 1 and not meeting:
            # Keeps a free port until torchrun listens there, which takes seconds: two sockets may have a port where
            # both allow it and one alone listens.
            self._reserved = socket.socket()
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.bind((address_of(config.placement.interface), 0))
            self._meeting = "{}:{}".format(*self._reserved.getsockname())

    def begin(self) -> None:
        """Start the processes, and on the first node request the other ones; returns at once."""
        self._process("learner", self._own)
        for node in range(1, self._config.learner.nodes) if self._node == 0 else ():
            self._process(f"learner {node + 1}", partial(self._other, node))

    def _own(self) -> ServiceSpec:
        learner = self._config.learner.model_copy(update={"rendezvous": self._meeting})
        interface = self._config.placement.interface
        # By which processes of several nodes meet on the interface, unless they are set.
        defaults = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if learner.nodes > 1 else {}

        def command(report: Path) -> Command:
            argv, variables = learner_service.command(learner, str(report), self._node)
            interfaces = {name: os.environ.get(name, value) for name, value in defaults.items()}
            return argv, {**interfaces, **variables, KEY_VARIABLE: self._key}

        return self._describe(
            "learner",
            command,
            # Of the other nodes none reports: the first one's processes answer when all are there.
            ready=lambda report: bool(pulse.ask(report["pulse"], READY_SECONDS, self._key)),
            max_restarts=0,
            needs=NEEDS,
        )

    def _other(self, node: int) -> ServiceSpec:
        return self._describe(
            f"learner {node + 1}",
            lambda report: (stand_in(self._config, "learner", str(node + 1), self._meeting, report), {}),
            ready=bool,
            max_restarts=0,
            needs=STAND_IN_NEEDS,
        )

"""The learner's process, brought to any recorded policy, and back there after it was lost.

It is started early and waited for late, and never handed out while its weights are not the recorded ones. Where the
optimizer state of a policy was not saved, recorded batches are trained again from the last one that was.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from configs.fields import is_operational
from configs.run import RunConfig
from configs.services import LearnerConfig
from configs.training import TrainingConfig
from flows.services.base import Command, RunService, Supervisor
from flows.services.pools import STAND_IN_NEEDS, address_of, shared_key, stand_in
from flows.services.process import Handle, ServiceFailed, ServiceSpec
from storage.errors import PolicyAbsent
from storage.policies.manifest import adapter_base
from storage.refs import Entry
from tasks.learner import client as learner_service
from tasks.learner import pulse
from tasks.learner.client import Learner
from tasks.learner.digest import INDEX_FILE, relative_difference, weight_paths
from tasks.learner.protocol import KEY_VARIABLE, BatchReference, LearnerError, LearnerLost, state_file
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy

MOST_DIFFERENCE = 1e-5
"""Norm of the difference of weights that were trained again on CUDA, over the norm of the weights. A step at a learning
rate of 1e-6 changes weights of 0.02 by about 5e-5 of their norm; sums in another order move a fraction of that."""
MOST_ROUNDED_DIFFERENCE = 2e-4
"""The same of weights in bfloat16. Such a difference turns one value in 400 to the next one, 1/256 away at most."""
NEEDS = ("AWS_*",)
"""It reads packed rows from the store, which may be in S3."""
EngineAsleep = Callable[[], AbstractContextManager[None]]
READY_SECONDS = 2.0
"""Longest wait for a starting learner's answer, before it is asked again."""


class WeightsDiffer(ValueError):
    """Training recorded batches again gave other weights than the recorded ones."""


class LearnerProcess(RunService):
    """The learner's process, brought to any recorded policy, its optimizer state included."""

    keyword = "learner"
    deployment = "serve/learner"

    def __init__(self, supervisor: Supervisor, context: RunContext, engine_asleep: EngineAsleep = nullcontext) -> None:
        """`engine_asleep` keeps the engine from the GPU that both have, where there is no room for both."""
        super().__init__(supervisor)
        self._context = context
        self._engine_asleep = engine_asleep
        self._learner: tuple[int, Learner] | None = None
        self._answered: dict[str, Any] = {}
        """Report of the generation that was last seen to answer."""

    @cached_property
    def state_directory(self) -> str:
        """Where the learner keeps optimizer state that is not saved; empty where it keeps none."""
        config = self._context.config
        memory = config.learner.memory_directory
        if not config.learner.keep_state or config.training.save_optimizer_every == 1:
            return ""
        if not Path(memory).is_dir():
            raise ServiceFailed(
                f"learner.memory_directory: {memory} is no directory of this machine. Nothing was trained; name one, "
                "for example /dev/shm, or leave it empty"
            )
        return str(self.supervisor.scratch_in(Path(memory)))

    def begin(self) -> None:
        """Start the learner; returns at once."""
        self._handle()

    def check_available(self) -> None:
        """Do nothing: nobody else runs a learner of ours."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block the learner may take what memory its GPU has; afterwards it keeps its state alone."""
        with self._engine_asleep():
            yield
            # One that is gone has given everything back.
            with suppress(LearnerLost):
                if self._learner is not None:
                    self._learner[1].release()

    def restore(self, policy: Policy) -> Learner:
        """Return a learner that holds the weights and the optimizer state of `policy`.

        Where no optimizer state was saved, the recorded batches since the last one that was are trained again, with
        the settings that they were trained with.
        Raises LearnerLost when it dies on the way, ServiceFailed when no restart is left, and WeightsDiffer when
        training again does not give the recorded weights.
        """
        learner = self._connect()
        # The learner of a run that goes on mostly holds it already, and loading is the slow part.
        held = learner.state()["policy_key"]
        if held == policy.key:
            return learner
        LearnerRecovery(learner, self._context, self._sections, self.state_directory).recover(policy, held)
        return learner

    def load_fresh(self, policy: Policy, directory: Path) -> Learner:
        """Return a learner that holds the weights in `directory` as `policy`, with no optimizer state."""
        learner = self._connect()
        learner.load(policy.key, str(directory), fresh_optimizer=True)
        return learner

    def _handle(self) -> Handle:
        return self._process("learner", self._spec)

    def _connect(self) -> Learner:
        handle = self._handle()
        while True:
            generation = handle.generation  # read first: a restart in between then shows as a lost learner
            report = handle.wait()  # returns after a restart, or raises when none is left
            try:
                if self._learner is None or self._learner[0] != generation:
                    self._learner = (generation, self._configure(report["address"]))
                self._learner[1].state()
                return self._learner[1]
            except LearnerLost:
                self._learner, self._answered = None, {}  # asked again first: its guardian may be slow to see it gone

    def _configure(self, address: str) -> Learner:
        learner = Learner(address, self._key)
        learner.configure(*self._sections)
        return learner

    @property
    def _key(self) -> str:
        """What a learner of another machine must know, and whoever calls it; empty where it is on this one."""
        run = self._context.config
        return shared_key(run, "learner") if self._elsewhere(run) else ""

    @property
    def _sections(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config = self._context.config
        return config.training.model_dump(mode="json"), config.learner.model_dump(mode="json")

    def _spec(self) -> ServiceSpec:
        run = self._context.config
        return self._describe(
            "learner",
            lambda report: learner_service.command(run.learner, str(report)),
            self._ready,
            run.learner,
            (run, "learner", "1", ""),
            needs=NEEDS,
            hangs=lambda report: pulse.hangs(report["pulse"], run.learner.hang_seconds, self._key),
            startup_seconds=run.learner.startup_seconds,
        )

    def _ready(self, report: dict[str, Any]) -> bool:
        """Tell whether a generation answers; one that did is not asked again, as it may hang by now.

        It is then asked for what is wanted, which ends when it is ended; not being ready would end the run.
        """
        if report != self._answered:
            pulse.ask(report["pulse"], READY_SECONDS, self._key)
            self._answered = report
        return True


class LearnerNode(RunService):
    """The processes of a learner on one machine of a pool; the first node asks Prefect for the other ones.

    So the run has one flow run to wait for and to watch. When a node ends, the first one does, and all with it.
    """

    keyword = "learner"

    def __init__(self, supervisor: Supervisor, config: RunConfig, node: int, meeting: str) -> None:
        """`meeting` is where the first node waits for this one, as HOST:PORT; empty on the first one itself."""
        super().__init__(supervisor)
        self._config, self._node = config, node
        self._key = shared_key(config, "learner")
        self._held: socket.socket | None = None
        if config.learner.nodes > 1 and not meeting:
            self._held = _held_port(address_of(config.placement.interface))
            meeting = "{}:{}".format(*self._held.getsockname())
        self._meeting = meeting

    def begin(self) -> None:
        """Start the processes, and on the first node ask for the other ones; returns at once."""
        self._process("learner", self._own)
        for node in range(1, self._config.learner.nodes) if self._node == 0 else ():
            self._process(f"learner {node + 1}", partial(self._other, node))

    def check_available(self) -> None:
        """Do nothing: this is the machine that others reach."""

    def _own(self) -> ServiceSpec:
        learner = self._config.learner.model_copy(update={"rendezvous": self._meeting})

        def command(report: Path) -> Command:
            argv, variables = learner_service.command(learner, str(report), self._node)
            return argv, {**self._between_nodes(), **variables, KEY_VARIABLE: self._key}

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

    def _between_nodes(self) -> dict[str, str]:
        """Return the variables by which processes of several nodes meet on the interface, where nobody has set them."""
        if self._config.learner.nodes == 1:
            return {}
        interface = self._config.placement.interface
        named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return {name: os.environ.get(name, value) for name, value in named.items()}


def _held_port(address: str) -> socket.socket:
    """Return a socket that keeps a free port from others until torchrun listens there, which takes seconds."""
    held = socket.socket()
    # Two sockets may have a port where both allow it and one alone listens.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def recorded_work(context: RunContext, key: str) -> Entry:
    """Return the ledger row of work that is referred to; it may be another run's."""
    entry = context.find(key)
    assert entry is not None, f"{key} is referred to but not in the ledger"
    return entry


def recorded_policy(context: RunContext, policy_key: str) -> dict[str, Any]:
    """Return the policy's row of the policies table."""
    [piece] = recorded_work(context, policy_key).slices("policies")
    return dict(context.read(piece).to_pylist()[0])


def ancestry(context: RunContext, policy: Policy) -> list[dict[str, Any]]:
    """Return the rows of the policies from the last one that can be loaded whole to `policy`, oldest first.

    A policy can be loaded whole when its optimizer state was saved and its weights were not removed since, or when it
    has no parent and so no state.
    """
    way = [recorded_policy(context, policy.key)]
    find = context.store.policies.find
    # Backwards, as a policy names its parent and not its children.
    while way[0]["parent_key"] and not (way[0]["has_optimizer"] and find(way[0]["policy_key"]) is not None):
        way.insert(0, recorded_policy(context, way[0]["parent_key"]))
    return way


class LearnerRecovery:
    """Brings a learner to a recorded policy, optimizer state included, by training recorded batches again."""

    def __init__(
        self,
        learner: Learner,
        context: RunContext,
        sections: tuple[dict[str, Any], dict[str, Any]],
        state_directory: str = "",
    ) -> None:
        """With a `state_directory` see `kept_state` of the learner."""
        self._learner = learner
        self._state_directory = state_directory
        self._context = context
        self._training, self._own = sections
        """The sections training and learner that the learner is configured with, and is again in the end."""

    def recover(self, policy: Policy, held: str | None) -> None:
        """Go to `policy` from the nearest policy that can be loaded, or from the one that the learner holds.

        Raises WeightsDiffer when training again does not give the recorded weights.
        """
        way = ancestry(self._context, policy)
        # A replay may go on from policies that its source run trained with other settings.
        if any(self._foreign(row) for row in way[1:]):
            self._through_other_settings(way)
            return
        # From what it holds where that lies on the way: less is trained again.
        start = next((i for i, row in enumerate(way) if row["policy_key"] == held), 0)
        kept = next((i for i in range(len(way) - 1, start, -1) if self._load_kept(way[i])), 0)
        start = kept or start
        if not kept and way[start]["policy_key"] != held:
            self._load(way[0], self._context.store.policies.directory(way[0]["policy_key"]), self._training)
        for row in way[start + 1 :]:
            # The learner writes what it trains; the recorded weights stay, these go.
            with self._scratch(row) as scratch:
                self._train(row, scratch, save_optimizer=False)

    def _foreign(self, row: dict[str, Any]) -> bool:
        """Tell whether a policy was trained with other settings than the learner has: the run it belongs to had."""
        # Operational settings are left out: they do not change the weights.
        settings = self._settings(row)
        return settings != {name: self._training.get(name) for name in settings}

    def _settings(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of training that a policy was made with, those included that keys do not name."""
        recorded = TrainingConfig(**recorded_work(self._context, row["policy_key"]).section["training"])
        fields = TrainingConfig.model_fields
        values = recorded.model_dump(mode="json")
        return {name: value for name, value in values.items() if not is_operational(fields[name])}

    def _through_other_settings(self, way: Sequence[dict[str, Any]]) -> None:
        """Train each batch with its recorded settings; state goes from one to the next on disk, for a learner that is
        configured anew forgets."""
        directory = self._context.store.policies.directory(way[0]["policy_key"])
        before = way[0]
        with ExitStack() as scratches:
            for row in way[1:]:
                self._learner.configure(self._training | self._settings(row), self._own)
                self._load(before, directory, self._settings(row))
                directory, before = scratches.enter_context(self._scratch(row)), row
                self._train(row, directory, save_optimizer=True)
            # Back to the run's own settings for the steps to come.
            self._learner.configure(self._training, self._own)
            self._load(before, directory, self._training)

    def _load(self, row: dict[str, Any], directory: Path, training: dict[str, Any], state_directory: str = "") -> None:
        """Load a policy to train on with the settings `training`, from fresh state where theirs is of another kind."""
        trained = row["parent_key"] is not None  # weights that came in have no optimizer state, and need none
        trained = trained and _state_kind(self._settings(row)) == _state_kind(training)
        below = adapter_base(directory)
        base = str(self._context.store.policies.directory(below)) if below else ""
        named = {"state_directory": state_directory} if state_directory else {}
        self._learner.load(row["policy_key"], str(directory), fresh_optimizer=not trained, base=base, **named)

    def _load_kept(self, row: dict[str, Any]) -> bool:
        """Load a policy with the state that the learner kept of it on this machine; tell whether there was some."""
        key, ranks = row["policy_key"], LearnerConfig(**self._own).num_ranks
        names = [state_file(key, rank, ranks) for rank in range(ranks)] if self._state_directory else []
        if not names or not all((Path(self._state_directory) / name).is_file() for name in names):
            return False
        try:
            self._load(row, self._context.store.policies.directory(key), self._training, self._state_directory)
        except (LearnerError, PolicyAbsent) as error:
            logging.getLogger(__name__).warning("%s; recorded batches are trained again", error)
            return False
        return True

    def _train(self, row: dict[str, Any], directory: Path, save_optimizer: bool) -> None:
        """Train the recorded batches that made the policy of `row`; the weights must come out as recorded.

        On CUDA, where another driver or GPU may add up in another order, they may differ by `MOST_DIFFERENCE`: the
        learner then goes on from the recorded ones, with the state of the optimizer that it came to.
        """
        tolerant = self._training.get("device") == "cuda"
        step, batch = self._batch(row)
        self._learner.train(
            batch,
            step=step,
            policy_key_in=row["parent_key"],
            policy_key_out=row["policy_key"],
            directory_out=str(directory),
            save_optimizer=save_optimizer or tolerant,
        )
        found = self._learner.state()["weights_sha256"]
        if not (tolerant and found != row["weights_sha256"] and self._adopt_recorded(row, directory)):
            check_same_weights(row, found)

    def _batch(self, row: dict[str, Any]) -> tuple[int, BatchReference]:
        """Return the step that made a policy, and where the batch lies that it was trained on."""
        training = recorded_work(self._context, row["policy_key"])
        packing = recorded_work(self._context, training.inputs["packing"])
        slices = packing.slices("batches"), packing.slices("batch_images")
        return training.step, BatchReference(self._context.store.root.address, *slices)

    def _adopt_recorded(self, row: dict[str, Any], made: Path) -> bool:
        """Load the recorded weights beside the optimizer state in `made`, if those made there hardly differ."""
        policies, key = self._context.store.policies, row["policy_key"]
        if policies.find(key) is None:  # removed, so there is nothing to compare with
            return False
        recorded = policies.directory(key)
        difference = relative_difference(made, recorded)
        rounded = self._training.get("policy_dtype") == "bfloat16"
        most = MOST_ROUNDED_DIFFERENCE if rounded else MOST_DIFFERENCE
        if not difference <= most:
            return False
        logging.getLogger(__name__).warning(
            "policy %s (version %d): training its recorded batches again gave weights that differ by %.2g of their "
            "norm, of which %.2g is taken for rounding; the recorded weights are trained on",
            *(key, row["version"], difference, most),
        )
        for file in (*weight_paths(made), made / INDEX_FILE):
            file.unlink(missing_ok=True)
        for file in (*weight_paths(recorded), *recorded.glob(INDEX_FILE)):
            (made / file.name).symlink_to(file.resolve())
        below = adapter_base(recorded)
        base = str(policies.directory(below)) if below else ""
        self._learner.load(key, str(made), fresh_optimizer=False, base=base)
        return True

    @contextmanager
    def _scratch(self, row: dict[str, Any]) -> Iterator[Path]:
        scratch = self._context.store.policies.scratch(f"again-{row['policy_key']}")
        try:
            yield scratch
        finally:
            self._context.store.policies.discard(scratch)


def _state_kind(training: dict[str, Any]) -> tuple[str, bool]:
    """Return what optimizer state is for: the kind of optimizer, and whether all weights are trained or an adapter."""
    settings = TrainingConfig(**training)
    return settings.optimizer.state_kind, settings.lora is None


def check_same_weights(row: dict[str, Any], weights_sha256: str) -> None:
    """Raise WeightsDiffer unless `weights_sha256` is that of the policy's row."""
    if row["weights_sha256"] != weights_sha256:
        raise WeightsDiffer(
            f"policy {row['policy_key']} (version {row['version']}): training its recorded batches again gave weights "
            f"{weights_sha256[:12]}, recorded are {row['weights_sha256'][:12]}. The recorded weights and all tables "
            f"are safe; the optimizer state between them is not to be had on this machine with this torch. "
            f"Resume where the run was trained, or branch from this policy with a fresh optimizer (model.path)."
        )

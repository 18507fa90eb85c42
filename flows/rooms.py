"""The rooms: who keeps the engine and the learner alive, and at the policy that is asked for.

A room starts its service early and waits for it late. It puts a restarted service back to where it was, and never
hands out an engine whose log-probs differ from the learner's, nor a learner whose weights are not the recorded ones.
"""

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flows.leases import Lease
from flows.processes.service import Handle, ServiceSpec
from flows.processes.services import Supervisor
from flows.recovery import Retrace, policy_row
from storage.policies.adapters import bases
from tasks.inference.engine.checks import check_serving
from tasks.inference.engine.client import MODEL, Engine, EngineLost
from tasks.inference.engine.client import command as engine_command
from tasks.inference.engine.scoring import Served
from tasks.learner import launch as learner_service
from tasks.learner import pulse
from tasks.learner.client import Learner
from tasks.learner.errors import LearnerLost
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import MOST_LOSSES
from tasks.runtime.stage import Policy

READY_SECONDS = 2.0
"""Longest wait for a starting learner's answer, before it is asked again."""


class EngineRoom:
    """The inference engine, brought to any policy of the store.

    It is started with the run's first weights, or where there are none with the first policy that is asked for.
    """

    def __init__(self, supervisor: Supervisor, place: RunContext, source: Path) -> None:
        self._supervisor = supervisor
        self._place = place
        self._source = source
        self._lock = threading.Lock()
        self._lease = Lease()
        self._bringing = threading.Lock()
        self._handle: Handle | None = None
        self._proven = ""
        """Key of the policy that the engine was last seen to hold; a restarted engine says that it holds none."""
        config = place.config.engine
        self.key = os.environ.get(config.api_key_variable, "") if config.url else secrets.token_hex(16)
        """What the engine, and whoever calls it, must know; made anew for an engine of our own."""

    def begin(self) -> None:
        """Start the engine, or adopt an external one; returns at once."""
        if self._source.name or self._place.config.engine.url:  # else it waits for the first policy asked for
            self._begin(self._source)

    def _begin(self, source: Path) -> None:
        with self._lock:
            if self._handle is None:
                self._handle = self._supervisor.start(self._spec(source))

    def reach(self) -> None:
        """Wait for an engine that someone else runs; raises ServiceFailed when it does not answer."""
        if self._place.config.engine.url:
            self.begin()
            assert self._handle is not None
            self._handle.wait()

    def close(self) -> None:
        """End the engine, whoever's supervisor keeps it."""
        self._supervisor.close()

    @contextmanager
    def holding(self, policy: Policy) -> Iterator[Served]:
        """Give where `policy` is served, which it stays within the block; waits for those who hold another.

        Raises what `at` raises.
        """
        with self._lease.of(policy.key):
            yield self.at(policy)

    def at(self, policy: Policy) -> Served:
        """Return where `policy` is served, proven on the learner's probe; an adapter beside the base below it.

        It stays there as long as nobody asks for another: see `holding`.
        Raises ServiceFailed when no restart is left, EngineMismatch when the engine serves other weights than it says.
        """
        whole = self._base(policy) or policy.key
        self._begin(self._source if self._source.name else self._place.store.policies.directory(whole))
        assert self._handle is not None
        losses = 0
        while True:
            url = self._handle.wait()["url"]  # returns after a restart, or raises when none is left
            try:
                with self._bringing:  # those who share a policy bring it once
                    return self._bring(policy, url)
            except EngineLost:
                losses += 1  # an engine that lives and does not answer is not restarted
                if losses > MOST_LOSSES:
                    raise

    def _base(self, policy: Policy) -> str:
        """Return the key of the policy below an adapter; empty for a policy of whole weights."""
        return next(iter(bases(self._place.store, [policy.key])), "")

    def _bring(self, policy: Policy, url: str) -> Served:
        base, directory = self._base(policy), self._place.store.policies.directory
        served = Served(url, self.key, policy.key if base else MODEL, policy.key)
        with closing(Engine(url, self.key, model=served.model)) as engine:
            holds = engine.served() == policy.key
            if not holds:
                engine.serve(policy.key, directory(policy.key), (base, directory(base)) if base else None)
            if not holds or self._proven != policy.key:  # what an engine says it holds is no proof, whoever told it so
                check_serving(engine, policy_row(self._place, policy.key), self._place.config.engine)
                self._proven = policy.key
        return served

    def _ready(self, report: dict[str, Any]) -> bool:
        with closing(Engine(report["url"], self.key)) as engine:
            return engine.healthy()

    def _spec(self, source: Path) -> ServiceSpec:
        config = self._place.config
        report = self._supervisor.directory / "engine.json"
        argv, environment = engine_command(
            config.engine,
            config.model,
            source,
            report,
            config.training.lora,
            metrics=config.rollout.adaptive_in_flight,
        )
        return ServiceSpec(
            name="engine",
            argv=argv,
            env={**environment, config.engine.api_key_variable: self.key},
            report=report,
            log=self._supervisor.directory / "engine.log",
            ready=self._ready,
            startup_seconds=config.engine.startup_seconds,
            max_restarts=config.engine.max_restarts,
            external=config.engine.url,
        )


class LearnerRoom:
    """The learner's process, brought to any recorded policy, its optimizer state included."""

    def __init__(self, supervisor: Supervisor, place: RunContext) -> None:
        self._supervisor = supervisor
        self._place = place
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._learner: tuple[int, Learner] | None = None
        self._answered: dict[str, Any] = {}
        """Report of the generation that was last seen to answer."""

    def begin(self) -> None:
        """Start the learner; returns at once."""
        with self._lock:
            if self._handle is None:
                self._handle = self._supervisor.start(self._spec())

    def reach(self) -> None:
        """Do nothing: nobody else runs a learner of ours."""

    def at(self, policy: Policy) -> Learner:
        """Return a learner that holds the weights and the optimizer state of `policy`.

        Where no optimizer state was saved, the recorded batches since the last one that was are trained again, with
        the settings that they were trained with.
        Raises LearnerLost when it dies on the way, ServiceFailed when no restart is left, and WeightsDiffer when
        training again does not give the recorded weights.
        """
        learner = self._connected()
        held = learner.state()["policy_key"]
        if held == policy.key:
            return learner
        Retrace(learner, self._place, self._sections).to(policy, held)
        return learner

    def fresh(self, policy: Policy, directory: Path) -> Learner:
        """Return a learner that holds the weights in `directory` as `policy`, with no optimizer state."""
        learner = self._connected()
        learner.load(policy.key, str(directory), fresh_optimizer=True)
        return learner

    def _connected(self) -> Learner:
        self.begin()
        assert self._handle is not None
        while True:
            generation = self._handle.generation  # read first: a restart in between then shows as a lost learner
            report = self._handle.wait()  # returns after a restart, or raises when none is left
            try:
                if self._learner is None or self._learner[0] != generation:
                    self._learner = (generation, self._configured(report["address"]))
                self._learner[1].state()
                return self._learner[1]
            except LearnerLost:
                self._learner, self._answered = None, {}  # asked again first: its guardian may be slow to see it gone

    def _configured(self, address: str) -> Learner:
        learner = Learner(address)
        learner.configure(*self._sections)
        return learner

    @property
    def _sections(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config = self._place.config
        return config.training.model_dump(mode="json"), config.learner.model_dump(mode="json")

    def _spec(self) -> ServiceSpec:
        config = self._place.config.learner
        report = self._supervisor.directory / "learner.json"
        argv, environment = learner_service.command(config, str(report))
        return ServiceSpec(
            name="learner",
            argv=argv,
            env=environment,
            report=report,
            log=self._supervisor.directory / "learner.log",
            ready=self._ready,
            hangs=lambda report: pulse.hangs(report["pulse"], config.hang_seconds),
            startup_seconds=config.startup_seconds,
            max_restarts=config.max_restarts,
        )

    def _ready(self, report: dict[str, Any]) -> bool:
        """Tell whether a generation answers; one that did is not asked again, as it may hang by now.

        It is then asked for what is wanted, which ends when it is ended; not being ready would end the run.
        """
        if report != self._answered:
            pulse.ask(report["pulse"], READY_SECONDS)
            self._answered = report
        return True

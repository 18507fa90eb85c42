"""The room of the environment servers: one for each environment of a run, started early, watched, and started again."""

import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.leases import Lease
from flows.processes.service import Handle, ServiceSpec
from flows.processes.services import Supervisor
from tasks.inference.environments import servers as environment_service

GRACE_SECONDS = 30.0
"""A server ends the rollouts under way, which clear up what they have elsewhere, and waits 10 s for each worker."""


class EnvironmentRoom:
    """One environment server for each environment of the run, or the addresses of those that others run."""

    def __init__(self, supervisor: Supervisor, config: RunConfig, engine_key: str) -> None:
        self._supervisor = supervisor
        self._environments = config.environments
        # Where someone else's model is evaluated no engine is asked, and that variable may hold the key of theirs.
        self._engine_key = {} if config.external else {config.engine.api_key_variable: engine_key}
        self._lock = threading.Lock()
        self._lease = Lease()
        self._turns = itertools.count(1)
        self._handles: dict[str, Handle] = {}
        self._examples: pa.Table | None = None

    def begin(self) -> None:
        """Start the servers side by side, or adopt external ones; returns at once."""
        self._start(self._environments)

    def reach(self) -> None:
        """Wait for the servers that others run; raises ServiceFailed when one does not answer."""
        external = [each for each in self._environments if each.address]
        self._start(external)
        for each in external:
            self._handles[each.name].wait()

    def addresses(self) -> dict[str, str]:
        """Return the address of every environment's server, all of them answering."""
        self.begin()
        return {name: handle.wait()["address"] for name, handle in self._handles.items()}

    def sharing(self, alone: bool) -> AbstractContextManager[None]:
        """Use the servers within the block beside all others of the run who do, or `alone`; waits for that if need be.

        Whoever looks for the rollout that takes a server down must be sure that it is none of another step's.
        """
        return self._lease.of(f"alone {next(self._turns)}" if alone else "shared")

    def examples(self) -> pa.Table:
        """Return the examples of all environments, loaded once, in processes of their own."""
        with self._lock:
            if self._examples is None:
                self._examples = pa.concat_tables([environment_service.examples(each) for each in self._environments])
            return self._examples

    def _start(self, environments: Sequence[EnvironmentConfig]) -> None:
        with self._lock:
            for each in environments:
                if each.name not in self._handles:
                    self._handles[each.name] = self._supervisor.start(self._spec(each))

    def _spec(self, environment: EnvironmentConfig) -> ServiceSpec:
        report = self._supervisor.directory / f"environment-{environment.name}.json"
        argv, variables = environment_service.command(environment, report)
        return ServiceSpec(
            name=f"environment {environment.name}",
            argv=argv,
            env={**variables, **self._engine_key},
            report=report,
            log=self._supervisor.directory / f"environment-{environment.name}.log",
            ready=lambda found: environment_service.answers(found["address"]),
            hangs=lambda found: environment_service.hangs(found["address"], environment.hang_seconds),
            max_restarts=environment.max_restarts,
            # A server that hangs is first to be found out.
            startup_seconds=environment.startup_seconds + environment.hang_seconds,
            grace_seconds=GRACE_SECONDS,
            external=environment.address,
        )

"""Environment servers of a run: one for each environment, of ours or of others."""

import itertools
from contextlib import AbstractContextManager

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.services.base import PolicyLock, RunService, Supervisor
from flows.services.process import Handle, ServiceSpec
from tasks.inference.environments import servers as environment_service

GRACE_SECONDS = 30.0
"""A server ends the rollouts under way, which clear up what they have elsewhere, and waits 10 s for each worker."""


class EnvironmentServers(RunService):
    """One environment server for each environment of the run, or the addresses of those that others run."""

    keyword = "environments"

    def __init__(self, supervisor: Supervisor, config: RunConfig, engine_key: str) -> None:
        super().__init__(supervisor)
        self._environments = config.environments
        # Where someone else's model is evaluated no engine is asked, and that variable may hold the key of theirs.
        self._engine_key = {} if config.external else {config.engine.api_key_variable: engine_key}
        self._sharing = PolicyLock()
        self._turns = itertools.count(1)
        self._examples: pa.Table | None = None

    def begin(self) -> None:
        """Start the servers side by side, or adopt external ones; returns at once."""
        for each in self._environments:
            self._server(each)

    def reach(self) -> None:
        """Wait for the servers that others run; raises ServiceFailed when one does not answer."""
        for server in [self._server(each) for each in self._environments if each.address]:
            server.wait()

    def addresses(self) -> dict[str, str]:
        """Return the address of every environment's server, all of them answering."""
        servers = {each.name: self._server(each) for each in self._environments}
        return {name: server.wait()["address"] for name, server in servers.items()}

    def sharing(self, alone: bool) -> AbstractContextManager[None]:
        """Use the servers within the block beside all others of the run who do, or `alone`; waits for that if need be.

        Whoever looks for the rollout that takes a server down must be sure that it is none of another step's.
        """
        return self._sharing.hold(f"alone {next(self._turns)}" if alone else "shared")

    def examples(self) -> pa.Table:
        """Return the examples of all environments, loaded once, in processes of their own."""
        with self._lock:
            if self._examples is None:
                self._examples = pa.concat_tables([environment_service.examples(each) for each in self._environments])
            return self._examples

    def _server(self, environment: EnvironmentConfig) -> Handle:
        return self._process(environment.name, lambda: self._spec(environment))

    def _spec(self, environment: EnvironmentConfig) -> ServiceSpec:
        report = self._report(f"environment-{environment.name}")
        argv, variables = environment_service.command(environment, report)
        return ServiceSpec(
            name=f"environment {environment.name}",
            argv=argv,
            env={**variables, **self._engine_key},
            report=report,
            log=report.with_suffix(".log"),
            ready=lambda found: environment_service.answers(found["address"]),
            hangs=lambda found: environment_service.hangs(found["address"], environment.hang_seconds),
            max_restarts=environment.max_restarts,
            # A server that hangs is first to be found out.
            startup_seconds=environment.startup_seconds + environment.hang_seconds,
            grace_seconds=GRACE_SECONDS,
            external=environment.address,
        )

"""Processes with the code of environments: servers that play rollouts, and graders that score recorded traces again."""

import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.environments import EnvironmentConfig
from configs.errors import ConfigError
from configs.run import RunConfig
from flows.services.base import Command, RunService, Supervisor, ready_reports
from flows.services.judge_proxy import JudgeProxy
from flows.services.pools import shared_key
from flows.services.process import Handle, Report, ServiceSpec
from storage.keys import content_key
from tasks.arrays.columns import texts
from tasks.inference.environments import servers as environment_service
from tasks.inference.environments.packages import package_version
from tasks.inference.environments.prompt_limits import limit_prompts
from tasks.inference.grading import client as regrading
from tasks.runtime.process_variables import needed_by
from tasks.runtime.stage import retry_lost

GRACE_SECONDS = 30.0
"""A server ends the rollouts under way, which clear up what they have elsewhere, and waits 10 s for each worker."""


class EnvironmentServers(RunService):
    """The servers of each environment of the run, one or several, or the addresses of those that others run.

    Those of an environment that a training run only evaluates on start when it is first tried.
    """

    deployment = "serve/environment"

    def __init__(
        self, supervisor: Supervisor, config: RunConfig, engine_key: str, judges: JudgeProxy | None = None
    ) -> None:
        super().__init__(supervisor, config)
        self._judges = judges
        self._environments = {entry.name: entry for entry in config.served_environments.values()}
        external = config.external
        # Where someone else's model is evaluated no engine is asked, and that variable may hold the key of theirs.
        self._engine_key = {} if external else {config.engine.api_key_variable: engine_key}
        self._external_key = (external.api_key_variable,) if external else ()
        self._loaded: dict[str, environment_service.LoadedEnvironment] | None = None
        self._loading = threading.Lock()

    def begin(self) -> None:
        """Start the servers side by side, or adopt external ones; returns at once."""
        trained = {entry.name for entry in self._config.environments}
        for name in self._environments:
            if name in trained or self._config.kind == "evaluate":
                self._servers(name)

    def check_available(self) -> None:
        """Wait for the servers that others run; raises ServiceFailed when one does not answer."""
        external = [name for name, environment in self._environments.items() if environment.addresses]
        for server in [server for name in external for server in self._servers(name)]:
            server.wait()

    def addresses(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return for some environments the addresses of their servers that answer; waits where one has none.

        Raises ServiceFailed where no server of an environment is left.
        """
        # All are started before one is waited for.
        servers = {name: self._servers(name) for name in names}
        return {name: _addresses(ready_reports(handles)) for name, handles in servers.items()}

    def addresses_now(self, known: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return by environment the addresses of its servers that are there at this moment; waits for nothing.

        Servers of `known` addresses are not asked: it is only looked whether their processes are still the same.
        """

        def report_of(server: Handle) -> Report | None:
            report = server.report
            return report if server.alive and report.get("address") in known else server.ready_now()

        started = [name for name in self._environments if name in self._handles]
        return {name: _addresses([*filter(None, map(report_of, self._servers(name)))]) for name in started}

    def examples(self, names: Collection[str]) -> pa.Table:
        """Return the examples of some environments; raises what `load` raises."""
        loaded = self.load()
        return pa.concat_tables([loaded[name].examples for name in names])

    def load(self) -> dict[str, environment_service.LoadedEnvironment]:
        """Return the examples and facts of every environment by its name, loaded once, side by side.

        Raises EnvironmentUnavailable with what is wrong with each that cannot be loaded.
        """
        with self._loading:
            # Under a lock: the first step and the first evaluation ask at the same time, and loading takes long.
            if self._loaded is None:
                environments = [*self._environments.values()]
                loaded = environment_service.load_all(environments)
                self._loaded = {
                    environment.name: limit_prompts(environment, facts, self._config.model)
                    for environment, facts in zip(environments, loaded, strict=True)
                }
            return self._loaded

    def _servers(self, name: str) -> list[Handle]:
        environment = self._environments[name]
        names = environment.server_names
        return [self._process(name, partial(self._spec, environment, number)) for number, name in enumerate(names)]

    def _spec(self, environment: EnvironmentConfig, number: int = 0) -> ServiceSpec:
        name = environment.server_names[number]
        address = environment.addresses[number] if environment.addresses else ""
        on_pools = self._config.placement.services == "pools" and not address
        key = shared_key(self._config, "environment") if on_pools else ""

        def command(report: Path) -> Command:
            routed = self._judges.route(environment) if self._judges else environment
            argv, variables = environment_service.command(routed, report)
            return argv, {**variables, **self._engine_key, **({environment_service.KEY_VARIABLE: key} if key else {})}

        def answers(report: Report) -> bool:
            if key:
                from tasks.inference.environments.connections import remember_key  # it imports verifiers

                remember_key(report["address"], key)
            return bool(environment_service.answers(report["address"]))

        return self._describe(
            f"environment {name}",
            command,
            answers,
            environment,
            ("environment", name, ""),
            address,
            (*needed_by(environment), *self._external_key),
            hangs=lambda report: environment_service.hangs(report["address"], environment.hang_seconds),
            grace_seconds=GRACE_SECONDS,
        )


def _addresses(reports: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(report["address"] for report in reports)


def grader_digest(environments: Sequence[EnvironmentConfig]) -> str:
    """Return the digest of the code that scores, as it is installed now: that of each environment."""
    return content_key({each.name: package_version(each) for each in environments})


class GraderProcesses(RunService):
    """One grader for each environment whose traces are scored, in a process of its own until the session ends.

    In a replay that regrades they score rollouts and groups, else the groups of environments with `group_rewards`.
    """

    def __init__(self, supervisor: Supervisor, config: RunConfig, judges: JudgeProxy | None = None) -> None:
        super().__init__(supervisor, config)
        self._judges = judges
        self._environments = {entry.name: entry for entry in config.served_environments.values()}
        self._key = secrets.token_hex(16)
        self._scoring = threading.Lock()

    def begin(self) -> None:
        """Start the graders side by side; returns at once."""
        for name, environment in self._environments.items():
            if self._config.replay.regrade or environment.group_rewards:
                self._grader(name)

    def check_available(self) -> None:
        """Raise EnvironmentUnavailable where a package of an environment is missing; starts nothing."""
        for each in self._environments.values():
            package_version(each)

    def scores(self, examples: pa.Table, traces: pa.Table, messages: pa.Table) -> pa.Table:
        """Return scores of all traces that are not errored, environment after environment.

        What the traces have in common is scored, too: they are of whole groups. Outside of a regrading they are one
        group, and a function that ends its process twice is an error of its rollouts. Raises ConfigError for an
        environment that the config does not have, ServiceFailed where a grader does not start or stay.
        """
        scores = [regrading.SCORES.empty_table()]
        for name in dict.fromkeys(texts(traces.filter(pc.is_null(traces["error_class"]))["environment"])):
            of_environment = pc.field("environment") == name
            # Errored ones included: a reward may depend on what the others said.
            rows = traces.filter(of_environment)
            tried = _rows_of(examples.filter(of_environment), "example_id", rows)
            tables = {"examples": tried, "traces": rows, "messages": _rows_of(messages, "trace_id", rows)}
            with self._scoring:  # one group at a time: a process that is lost was lost by that one
                scores.append(self._scores(name, tables))
        return pa.concat_tables(scores)

    def _scores(self, name: str, tables: dict[str, pa.Table]) -> pa.Table:
        if name not in self._environments:
            known = ", ".join(self._environments) or "none"
            raise ConfigError([f"regrading: the traces are of environment {name!r}, the config has: {known}"])

        losses = count()

        def score() -> pa.Table:
            address = self._grader(name).wait()["address"]  # returns after a restart, or raises when none is left
            return regrading.scores(address, self._key, tables, next(losses))

        return retry_lost(score, regrading.GraderLost)

    def _grader(self, name: str) -> Handle:
        return self._process(name, lambda: self._spec(self._environments[name]))

    def _spec(self, environment: EnvironmentConfig) -> ServiceSpec:
        def command(report: Path) -> Command:
            scored = "rollouts" if self._config.replay.regrade else "groups"
            routed = self._judges.route(environment) if self._judges else environment
            argv, variables = environment_service.command(routed, report, "--grade", scored)
            return argv, {**variables, regrading.KEY_VARIABLE: self._key}

        return self._describe(
            f"grader {environment.name}",
            command,
            ready=lambda found: regrading.answers(found["address"], self._key),
            limits=environment,
            needs=needed_by(environment),
        )


def _rows_of(rows: pa.Table, column: str, others: pa.Table) -> pa.Table:
    """Return the rows whose value of a column is one of the other table's."""
    return rows.filter(pc.is_in(rows[column], value_set=others[column].combine_chunks()))

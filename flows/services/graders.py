"""Graders of a replay, which score recorded traces again, and the digest of the code that does."""

import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.environments import EnvironmentConfig
from configs.errors import ConfigError
from configs.run import RunConfig
from flows.services.base import RunService, Supervisor
from flows.services.process import Handle, ServiceSpec
from storage.keys import content_key
from tasks.arrays.columns import texts
from tasks.inference.grading import client as regrading
from tasks.inference.grading import client as regrading_sources
from tasks.runtime.services import retry_lost


def grader_digest(environments: Sequence[EnvironmentConfig]) -> str:
    """Return the digest of the code that scores, as it is installed now: of each environment's packages and verifiers.

    Data that this code reads from elsewhere is not in it.
    """
    return content_key({each.name: regrading_sources.source_digest(each) for each in environments})


class GraderProcesses(RunService):
    """One grader for each environment whose traces are scored, in a process of its own until the session ends."""

    keyword = "graders"

    def __init__(self, supervisor: Supervisor, config: RunConfig) -> None:
        super().__init__(supervisor)
        self._environments = {each.name: each for each in config.environments}
        self._key = secrets.token_hex(16)

    def begin(self) -> None:
        """Start the graders of all environments side by side; returns at once."""
        for name in self._environments:
            self._grader(name)

    def reach(self) -> None:
        """Raise EnvironmentUnavailable where a package of an environment is missing; starts nothing."""
        for each in self._environments.values():
            regrading.command(each, "")

    def scores(self, examples: pa.Table, traces: pa.Table, messages: pa.Table) -> pa.Table:
        """Return scores of all traces that are not errored, environment after environment.

        Raises NotRegradable for an environment that cannot be scored without a rollout, ConfigError for one that the
        config does not have, ServiceFailed where a grader does not start or stay.
        """
        unscored = traces.filter(pc.is_null(traces["error_class"]))
        found = [regrading.SCORES.empty_table()]
        for name in dict.fromkeys(texts(unscored["environment"])):
            own = unscored.filter(_among(unscored["environment"], pa.chunked_array([[name]])))
            episodes = traces.filter(_among(traces["episode_id"], own["episode_id"]))
            tables = {
                "examples": _of(examples, name, episodes),
                "traces": episodes,
                "messages": messages.filter(_among(messages["trace_id"], episodes["trace_id"])),
            }
            found.append(self._scores(name, tables))
        return pa.concat_tables(found)

    def _scores(self, name: str, tables: dict[str, pa.Table]) -> pa.Table:
        if name not in self._environments:
            known = ", ".join(self._environments) or "none"
            raise ConfigError([f"regrading: the traces are of environment {name!r}, the config has: {known}"])

        def score() -> pa.Table:
            address = self._grader(name).wait()["address"]  # returns after a restart, or raises when none is left
            return regrading.scores(address, self._key, tables)

        return retry_lost(score, regrading.GraderLost)

    def _grader(self, name: str) -> Handle:
        return self._process(name, lambda: self._spec(self._environments[name]))

    def _spec(self, environment: EnvironmentConfig) -> ServiceSpec:
        report = self._report(f"grader-{environment.name}")
        argv, variables = regrading.command(environment, report)
        return ServiceSpec(
            name=f"grader {environment.name}",
            argv=argv,
            env={**variables, regrading.KEY_VARIABLE: self._key},
            report=report,
            log=report.with_suffix(".log"),
            ready=lambda told: regrading.answers(told["address"], self._key),
        )


def _of(examples: pa.Table, environment: str, traces: pa.Table) -> pa.Table:
    own = examples.filter(_among(examples["environment"], pa.chunked_array([[environment]])))
    return own.filter(_among(own["example_id"], traces["example_id"]))


def _among(column: "pa.ChunkedArray[Any]", values: "pa.ChunkedArray[Any]") -> Any:
    return pc.is_in(column, value_set=values.combine_chunks())

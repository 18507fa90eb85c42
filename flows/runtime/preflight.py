"""What is looked for before a run starts anything: what would make it fail later, after services and minutes."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from configs.environments import EnvironmentConfig
from configs.errors import ConfigError, differing_parts
from configs.run import RunConfig
from configs.store_paths import relative_paths
from flows.orchestration.server import probe
from flows.orchestration.settings import DeployRefused, required_url
from flows.orchestration.table_workers import require_package
from flows.runtime.environment_checks import environment_findings
from flows.runtime.machine_facts import container_notes, doubtful_settings
from flows.runtime.policy_retention import require_space
from flows.runtime.resolve_run import nothing_started
from flows.runtime.session import Session
from flows.services.memory import plan_here, require_memory
from storage.records import REMOVED
from tasks.gate.stage import require_rule
from tasks.inference.engine.model_info import count_tokens, model_directory
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

JUDGED = ("kind", "environments", "algorithm", "evaluation", "engine", "model")
"""Sections that say whether environments fit a run."""


def preflight(session: Session, missing: Sequence[Ref]) -> None:
    """Make sure that the missing work can begin: a gate's rule, room on the disk, services, environments that fit.

    Raises ConfigError, NoSpace, ServiceFailed or EnvironmentUnavailable; nothing was started then.
    """
    stages = {piece.stage for piece in missing}
    for line in edits_since(session.context, stages):
        session.notify("note", text=line)
    for line in doubtful_settings(session.config):
        session.notify("note", text=line)
    with nothing_started():
        require_gate(session.config)
        require_package(session.config.prefect)
        needed = session.needed_services(missing)
        here = session.config.placement.services == "local"  # the GPUs of pools are other machines'
        if needed and here and (plan := plan_here(session.config)):
            require_memory(plan)
        # Tables are small beside weights; without these, only a little room is asked for.
        makes_weights = bool(stages & {"training", "policy_import"})
        require_space(session.context.store, session.config, Path(session.source.weights) if makes_weights else None)
        if not here:
            require_services(each.deployment for each in needed if each.deployment)
        for service in needed:
            service.check_available()
        # Loaded in processes of their own, and kept for the stage: what does not load or fit is known now.
        if _asks_environments(session.context, stages):
            for line in require_fit(session.config, session.environments.load()):
                session.notify("note", text=line)


def require_fit(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> list[str]:
    """Return what is to be said of a run in its loaded environments; raises ConfigError where it cannot work there."""
    place = config.model.tokenizer or config.model.path

    def count(texts: Sequence[str]) -> list[int] | None:
        return count_tokens(model_directory(place), texts) if place and not config.external else None

    findings = environment_findings(config, loaded, count)
    if findings.problems:
        raise ConfigError(findings.problems)
    return [*findings.notes, *container_notes(config)]


def _asks_environments(context: RunContext, stages: Set[str]) -> bool:
    """Tell whether environments are to be loaded: for their examples, or as no run of the store was checked alike."""
    if context.config.kind == "sft" or not stages & {"examples", "rollout"}:
        return False
    if "examples" in stages:
        return True
    ours = relative_paths(context.config, context.store.root.directory).model_dump(mode="json")
    runs = context.store.runs
    recorded = (runs.config(run) for run in runs.names() if runs.last_event(run) != REMOVED)
    # A run is recorded once it has been checked; the same run goes on without that.
    return not any(all(each.get(name) == ours[name] for name in JUDGED) for each in recorded)


def edits_since(context: RunContext, stages: Collection[str]) -> list[str]:
    """Return, for each environment of a new run whose code or packages no recorded run had, what that makes anew.

    `stages` are those of missing work. A replay is compared with the run that it goes through, any other with the
    newest run of the same environment.
    """
    anew = [stage for stage in ("examples", "assignment", "rollout", "regrade") if stage in stages]
    runs, source = context.store.runs, context.config.replay.run
    known = [] if context.run in runs.names() or not anew else [source] if source else runs.names()[::-1]
    recorded = {run: runs.config(run) for run in known if runs.last_event(run) != REMOVED}
    lines = []
    for each in context.config.environments:
        earlier = {run: version for run, config in recorded.items() if (version := _version_in(config, each))}
        if not each.version or not earlier or each.version in earlier.values():
            continue
        run = next(iter(earlier))
        old, new = differing_parts(earlier[run], each.version)
        lines.append(
            f"environment {each.name!r} is other code than in run {run!r}: there {old}, here {new}. Computed again "
            f"with it: {', '.join(anew)}"
        )
        # An evaluation's rollouts are no steps that could be gone through again.
        if "rollout" in anew and {context.config.kind, recorded[run].get("kind")} == {"train"}:
            lines[-1] += f"; rollouts as they are, scored by this code: stagecoach replay {run} --regrade"
    return lines


def _version_in(config: Mapping[str, Any], environment: EnvironmentConfig) -> str:
    """Return the version that a recorded config has of an environment; empty where it has not that environment."""
    found = (each for each in config.get("environments", ()) if each["name"] == environment.name)
    return next(
        (each.get("version", "") for each in found if each["taskset"].get("id") == environment.taskset.get("id")), ""
    )


def require_gate(config: RunConfig) -> None:
    """Raise ConfigError where the gate's rule is no condition in SQL over the figures of a batch."""
    if config.gate.type == "rule":
        require_rule(config.gate.rule)


def require_services(names: Iterable[str]) -> None:
    """Raise DeployRefused where no Prefect server is configured, or it lacks a deployment that a run asks services of.

    Raises PrefectUnreachable where the server does not answer.
    """
    url = required_url("and placement.services is pools. Nothing was started")
    probe(url)
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        for name in names:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound as problem:
                raise DeployRefused(
                    f"the Prefect server at {url} has no deployment {name}. Nothing was started: run `stagecoach "
                    "deploy`, and workers for the pools of services: prefect worker start --pool engines"
                ) from problem

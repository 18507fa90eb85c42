"""What is looked for before a run starts anything: what would make it fail later, after services and minutes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.orchestration.server import api_client, probe
from flows.orchestration.settings import DeployRefused, required_url
from flows.orchestration.table_workers import require_package
from flows.runtime.environment_checks import environment_findings
from flows.runtime.policy_retention import require_space
from flows.runtime.resolve_run import nothing_started
from flows.runtime.session import Session
from flows.services.memory import plan_here, require_memory
from storage.records import REMOVED
from tasks.gate.stage import require_rule
from tasks.inference.engine.model_info import count_tokens, model_directory
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.runtime.stage import Ref


def preflight(session: Session, missing: Sequence[Ref]) -> None:
    """Make sure that the missing work can begin: a gate's rule, room on the disk, services, environments that fit.

    Raises ConfigError, NoSpace, ServiceFailed or EnvironmentUnavailable; nothing was started then.
    """
    config, stages = session.config, {ref.stage for ref in missing}
    with nothing_started():
        require_gate(config)
        require_package(config.prefect)
        needed = session.needed_services(missing)
        is_local = config.placement.services == "local"  # the GPUs of pools are other machines'
        if needed and is_local and (plan := plan_here(config)):
            require_memory(plan)
        # Tables are small beside weights; without these, only a little room is asked for.
        makes_weights = bool(stages & {"training", "policy_import"})
        require_space(session.context.store, config, Path(session.source.weights) if makes_weights else None)
        if not is_local and (deployments := [service.deployment for service in needed if service.deployment]):
            require_deployments(deployments)
        for service in needed:
            service.check_available()
        # Loaded in processes of their own, and kept for the stage; a recorded run was checked when it began.
        last = session.context.store.runs.last(config.name)
        is_checked = last is not None and last.event != REMOVED
        if config.kind != "sft" and ("examples" in stages or ("rollout" in stages and not is_checked)):
            for line in require_fit(config, session.environments.load()):
                session.notify("note", text=line)


def require_deployments(names: Iterable[str]) -> None:
    """Raise DeployRefused where no Prefect server is configured, or it lacks a deployment that gives services.

    Raises PrefectUnreachable where the server does not answer.
    """
    probe(url := required_url("and placement.services is pools. Nothing was started"))
    from prefect.exceptions import ObjectNotFound

    with api_client() as client:
        for name in names:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound as error:
                raise DeployRefused(
                    f"the Prefect server at {url} has no deployment {name}. Nothing was started: run `stagecoach "
                    "deploy`, and workers for the pools of services: prefect worker start --pool engines"
                ) from error


def require_fit(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> list[str]:
    """Return what is to be said of a run in its loaded environments; raises ConfigError where it cannot work there."""
    place = config.model.tokenizer or config.model.path

    def count(texts: Sequence[str]) -> list[int] | None:
        return count_tokens(model_directory(place), texts) if place and not config.external else None

    findings = environment_findings(config, loaded, count)
    if findings.problems:
        raise ConfigError(findings.problems)
    return findings.notes


def require_gate(config: RunConfig) -> None:
    """Raise ConfigError where the gate's rule is no condition in SQL over the figures of a batch."""
    if config.gate.type == "rule":
        require_rule(config.gate.rule)

"""Deploy: put the deployments of `deploy/prefect.yaml`, and what they need, on the Prefect server that is configured.

Everything is made or brought up to date, so the command can be repeated: the work pool, the limit of GPU slots, the
automation that marks lost runs as crashed, the deployments. Schedules that someone switched on or off in Prefect are
set back to what the file says.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from configs.run import RunConfig
from flows.orchestration import prefect_api
from flows.orchestration.prefect_settings import configured_url
from flows.orchestration.reaper import mark_crashed
from storage.store import FORMAT, open_store

FILE = Path(__file__).parents[2] / "deploy" / "prefect.yaml"
POOL = "stagecoach"


class DeployRefused(ValueError):
    """Nothing was deployed, for a reason that the message names."""


def main(pool: str = POOL, store: str = "", slots: int = 1, file: str = "") -> int:
    """Deploy to the configured server and print what was done; return the exit status.

    `store` is the root that every deployment gets as its default, `slots` how many runs may have an engine or a learner
    at a time. Raises DeployRefused where no server is configured, PrefectUnreachable where it does not answer.
    """
    url = configured_url()
    if not url:
        raise DeployRefused(
            "no Prefect server is configured, nothing was deployed. Start one (prefect server start) and say where it "
            "is: export PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    prefect_api.probe(url)
    found = read(Path(file) if file else FILE)
    from flows.orchestration import prefect_server_side as server

    limit = f"{pool}-gpu"
    print(f"Prefect server {url}")
    for name in prefect_api.crash_stale_runs(embedded=False):
        print(f"  flow run {name}: its process is gone, marked as crashed")
    print(f"  work pool {pool}: {server.ensure_pool(pool)}")
    print(f"  limit {limit}: {server.ensure_limit(limit, slots)}")
    print(f"  automation {server.AUTOMATION!r}: {server.ensure_automation()}")
    root = absolute(store or RunConfig().store)
    for each in found:
        print(f"  deployment {register(each, pool, root, limit)}")
    for name in lost_runs(root):
        print(f"  run {name} of the store: its process is gone, marked as crashed")
    print(f"Runs are kept in {root}. Next, on each machine:\n  prefect worker start --pool {pool}")
    return 0


def read(file: Path) -> list[dict[str, Any]]:
    """Return the deployments that a file describes. Raises DeployRefused where it cannot be read."""
    try:
        return list(yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DeployRefused(
            f"{file} cannot be read as a file of deployments: {type(error).__name__}: {error}. Nothing was deployed. "
            f"It lies in a checkout of the project; name another with --file"
        ) from error


def absolute(store: str) -> str:
    """Return a store's root as workers find it: a worker's runs begin in directories of their own."""
    return store if "://" in store else str(Path(store).expanduser().resolve())


def lost_runs(root: str) -> list[str]:
    """Mark runs of a store on this machine as crashed whose process is gone; return their names. Makes no store."""
    there = "://" not in root and Path(root, FORMAT).is_file()
    return mark_crashed(open_store(root)) if there else []


def register(described: Mapping[str, Any], pool: str, store: str, limit: str) -> str:
    """Make or update one deployment; return its full name."""
    from prefect.flows import EntrypointType
    from prefect.schedules import Cron

    module, _, name = described["entrypoint"].partition(":")
    flow = getattr(import_module(module), name)
    variables = described["work_pool"]["job_variables"]["env"] | {"STAGECOACH_GPU_LIMIT": limit}
    deployment = flow.to_deployment(
        described["name"],
        description=described["description"],
        parameters={**described["parameters"], "store": store},
        tags=described["tags"],
        schedules=[_schedule(Cron, each) for each in described.get("schedules", [])],
        work_pool_name=pool,
        job_variables={"env": variables},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment.apply()
    return f"{flow.name}/{described['name']}"


def _schedule(cron: Any, described: Mapping[str, Any]) -> Any:
    others = {name: value for name, value in described.items() if name != "cron"}
    return cron(described["cron"], **others)

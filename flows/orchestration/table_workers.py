"""Worker processes of Dask or Ray for the stages that only read and write tables: Prefect's own task runners.

Which stages go there is decided where they are called (`tasks.runtime.prefect_task`): those that wait for nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from configs.errors import ConfigError
from configs.services import PrefectConfig


def require_package(config: PrefectConfig) -> None:
    """Raise ConfigError where the package of the wanted task runner is not installed."""
    kind = config.task_runner
    if kind != "none" and find_spec(f"prefect_{kind}") is None:
        raise ConfigError(
            f"prefect.task_runner is {kind}, but the package prefect-{kind} is not installed. Install it beside "
            f"Stagecoach (pip install prefect-{kind}), or leave out prefect.task_runner"
        )


@contextmanager
def table_workers(config: PrefectConfig) -> Iterator[None]:
    """Give the flow run around a task runner with worker processes, where the config names one."""
    if config.task_runner == "none":
        yield
        return
    from prefect.context import FlowRunContext

    context: Any = FlowRunContext.get()  # of a run with a task runner, which is a flow run
    with _task_runner(config) as runner, context.model_copy(update={"task_runner": runner}):
        yield


def _task_runner(config: PrefectConfig) -> Any:
    address = config.task_cluster or None
    if config.task_runner == "ray":
        from prefect_ray import RayTaskRunner

        return RayTaskRunner(address=address, init_kwargs={} if address else {"num_cpus": config.task_workers})
    from prefect_dask import DaskTaskRunner

    # A worker process computes one stage at a time. Its page of diagnostics would be open to all users of the machine.
    own = {"n_workers": config.task_workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    return DaskTaskRunner(address=address, cluster_kwargs={} if address else own)

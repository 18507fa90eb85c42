"""RunFlow: a Prefect flow that makes a run, for the modules of flows/ that define one."""

from collections.abc import Callable
from typing import Any

from prefect import Flow
from prefect.settings import get_current_settings

from flows.orchestration.states import OF_A_RESULT, note_end

OF_A_RUN: dict[str, Any] = {
    **OF_A_RESULT,
    "validate_parameters": False,  # the config checks them, and says in its own words what is wrong
    "on_crashed": [note_end],
    "on_cancellation": [note_end],
}
"""Arguments of every flow that makes a run."""


class NoPrefectServer(ValueError):
    """A flow was called in a process that has no Prefect server to report to."""


class RunFlow(Flow[..., Any]):
    """A flow whose call raises NoPrefectServer at once where there is no Prefect server.

    Prefect would start one by itself, wait for it most of a minute, and give up.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the flow as Prefect does."""
        if not get_current_settings().api.url:
            raise NoPrefectServer(
                f"the flow {self.name!r} was called, and no Prefect server is configured; nothing was started. Call "
                "it by `import stagecoach` (stagecoach.run and others), which brings a server for the run, or start "
                "one (prefect server start) and say where it is: PREFECT_API_URL=http://127.0.0.1:4200/api"
            )
        return super().__call__(*arguments, **named)


def run_flow(name: str, flow_run_name: Callable[[], str]) -> Callable[[Callable[..., Any]], RunFlow]:
    """Return a decorator that makes a function the flow of a run."""
    return lambda function: RunFlow(function, name=name, flow_run_name=flow_run_name, **OF_A_RUN)

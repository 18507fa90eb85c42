"""run_flow: the Prefect flow of a kind of run: what its flow runs are called, and how they report their end.

Imports Prefect, so for the modules that define flows alone; called in the thread that Prefect runs the flow in.
"""

import logging
import re
from collections.abc import Callable
from datetime import UTC
from functools import wraps
from typing import Any

from prefect import Flow
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.sorting import FlowRunSort
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed

from flows import PACKAGES
from flows.orchestration.server import api_client, bookkeeping_only, current_flow_run, flow_run_record
from flows.orchestration.states import RunCancelled, note_end
from flows.reporting.messages import outcome_message
from storage.keys import content_key
from tasks.runtime.prefect_task import error_text

DIGEST_CHARACTERS = 8
CACHED = "Cached"
"""Name of the state of a run that completed and computed nothing."""
REPEATED = (
    ". The run of this deployment before it computed nothing either: leave name and seed out to compute again, or set "
    "continue_run to train a run further"
)


def reports_its_end(flow_function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a flow end in a state of Prefect that says everything; the caller of the flow gets the error itself.

    The border at which any exception becomes a state. Errors that only a traceback explains are logged with one.
    """

    @wraps(flow_function)
    def ending(*args: Any, **kwargs: Any) -> Any:
        try:
            return _completion_state(flow_function(*args, **kwargs))
        except RunCancelled as error:
            return Cancelled(message=str(error), data=error)
        except Exception as error:
            _log_error(error)
            return Failed(message=error_text(error), data=error)

    return ending


def _completion_state(outcome: Any) -> Any:
    """Return the state of a flow that ends well, with its results in a line; outside of a flow run its values."""
    if current_flow_run() is None or not isinstance(outcome, dict):
        return outcome
    message = outcome_message(outcome)
    if outcome.get("num_computed") != 0:
        return Completed(message=message, data=outcome)
    message = f"Cached: nothing was computed; {message}"
    if _last_of_schedule_was_cached():
        message += REPEATED
        _run_log().warning("%s", message)
    return Completed(name=CACHED, message=message, data=outcome)


def _last_of_schedule_was_cached() -> bool:
    """Return whether the flow run is of a schedule, and the run of its deployment before it computed nothing."""
    record = flow_run_record()
    if record is None or not record.auto_scheduled:
        return False
    earlier = {
        "deployment_id": {"any_": [str(record.deployment_id)]},
        "state": {"type": {"any_": ["COMPLETED"]}},
        "id": {"not_any_": [str(record.id)]},
    }
    with bookkeeping_only("whether its schedule trains"), api_client() as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(earlier), sort=FlowRunSort.END_TIME_DESC, limit=1
        )
        return any(run.state_name == CACHED for run in runs)
    return False


def _run_log() -> Any:
    return get_run_logger() if current_flow_run() else logging.getLogger("stagecoach")


def _log_error(error: Exception) -> None:
    """Write an error into the flow run's logs, in lines: a state's message is on one line there."""
    # An error of ours says in words what is wrong; another needs its traceback.
    ours = type(error).__module__.partition(".")[0] in PACKAGES
    _run_log().error(error_text(error), exc_info=None if ours else error)

    def is_new(record: logging.LogRecord) -> bool:
        return not (record.exc_info and record.exc_info[1] and error_text(record.exc_info[1]) == error_text(error))

    # Prefect's engine logs the same error once more, with a traceback whatever it says.
    logging.getLogger("prefect.flow_runs").addFilter(is_new)


def run_flow(kind: str) -> Callable[[Callable[..., Any]], Flow[..., Any]]:
    """Return a decorator that makes a function the flow of a kind of run."""
    return lambda function: Flow(
        reports_its_end(function),
        name=kind,
        flow_run_name=flow_run_name(kind),
        # The config of a run checks them, and says in its own words what is wrong; maintenance has none.
        validate_parameters=kind == "maintain",
        on_crashed=[note_end],
        on_cancellation=[note_end],
        # As JSON, for the caller of a deployment. Runs themselves read the ledger alone.
        persist_result=True,
        result_serializer="json",
    )


def run_name(kind: str) -> str:
    """Return a name for a run that has none: one name per flow run, also for its retries; empty outside of a flow run.

    Kind, deployment and scheduled minute in UTC are for people. The digest is of the whole id: a scheduler makes the
    flow runs of a batch with ids that begin alike.
    """
    flow_run_id = current_flow_run()
    if flow_run_id is None:
        return ""
    deployed_as = re.sub(r"[^A-Za-z0-9._-]+", "-", deployment.name or kind)
    digest = content_key(flow_run_id)[:DIGEST_CHARACTERS]
    return "-".join(dict.fromkeys((kind, deployed_as, _scheduled_minute(), digest)))


def _scheduled_minute() -> str:
    return f"{flow_run.scheduled_start_time.astimezone(UTC):%Y%m%d-%H%M}"


def flow_run_name(kind: str) -> Callable[[], str]:
    """Return the function that names the flow runs of a kind after their run in the store.

    A replay without a name is named after the run that it replays, and maintenance, which has no run, after its minute.
    A person may have typed the name of a flow run of a deployment that no schedule has made: such a name stays, and the
    run's name follows it.
    """

    def name() -> str:
        parameters = flow_run.parameters or {}
        run = str(parameters.get("name") or parameters.get("continue_run") or "")
        if not run:
            has_name = kind not in ("replay", "maintain")
            run = run_name(kind) if has_name else parameters.get("run") or _scheduled_minute()
        run = run if run.startswith(f"{kind}-") else f"{kind}-{run}"
        record = flow_run_record()
        if record is None or not record.deployment_id or record.auto_scheduled:
            return run
        return flow_run.name if flow_run.name.endswith(run) else f"{flow_run.name} {run}"

    return name

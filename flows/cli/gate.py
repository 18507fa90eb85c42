"""The command gate: prints the decisions at the gates of a run, or answers a gate that waits."""

import getpass
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from flows.cli.arguments import RunOrLatest, StoreOption, UsageError, one_of, option, stored_run
from flows.reporting.formats import say

if TYPE_CHECKING:
    from configs.run import RunConfig
    from storage.store import Store

ANSWER = one_of()


class NothingWaits(ValueError):
    """No flow run of that name waits for an answer."""

    def __init__(self, run: str, why: str) -> None:
        super().__init__(
            f"run {run} does not wait for an answer: {why}. Nothing was changed. Look at it with: stagecoach show "
            f"{run}; its decisions so far: stagecoach gate {run}"
        )


def gate(
    run: RunOrLatest = "latest",
    /,
    *,
    approve: Annotated[bool, option("train on the batch that waits", group=ANSWER)] = False,
    refuse: Annotated[bool, option("stop the run before this batch; it can be resumed", group=ANSWER)] = False,
    by: Annotated[str, option("name of the person who decides; by default the name of the user")] = "",
    reason: Annotated[str, option("the reason; it is part of the decision")] = "",
    store: StoreOption = "",
) -> int:
    """Print the decisions at a run's gates or, with `approve` or `refuse`, answer the gate that waits.

    Raises ConfigError for an unknown run, NothingWaits if no gate waits, LayoutError without a store.
    """
    from flows.orchestration.gate_answers import decision_lines

    if not (approve or refuse) and (by or reason):
        raise UsageError("--by and --reason belong to an answer: give --approve or --refuse")
    reader, name, config = stored_run(store, run)
    if not (approve or refuse):
        for line in decision_lines(decisions(reader.store, name)) or [
            f"run {name} has no decisions: gate.type is {config.gate.type}"
        ]:
            say(line)
        return 0
    answer = {"approve": approve, "by": by or getpass.getuser(), "reason": reason}
    flow_run = _answer(reader.store, name, config.model_copy(update={"store": store or config.store}), answer)
    say(f"{'approved' if approve else 'refused'} by {answer['by']}; run {name} ({flow_run}) goes on within seconds")
    return 0


def decisions(store: "Store", run: str) -> list[Mapping[str, Any]]:
    """Return the decisions at the gates of a run in order of time, each with its step."""
    entries = store.ledger.entries(run=run, stage="gate")
    rows = [{"step": gate.step, **row} for gate in entries for row in store.read(gate.slices("decisions")).to_pylist()]
    return sorted(rows, key=lambda row: row["decided_at"])


def _answer(store: "Store", run: str, config: "RunConfig", answer: Mapping[str, Any]) -> str:
    """Give the answer to the flow run of the run's last event; return its name."""
    from flows.orchestration.settings import configured_url, embedded_settings
    from flows.runtime.session import log_directory

    # The last event is of whoever is at work on the run; an earlier flow run of it has ended.
    flow_run = store.runs.events(run)[-1].flow_run
    # Servers that runs bring along leave a report of their address beside their database.
    directory = log_directory(config).parent / "prefect"
    url = configured_url() or next(embedded_urls(directory), "")
    if not flow_run or not url:
        raise NothingWaits(run, "it is not at work, or on another machine")
    if not configured_url():
        assert "prefect" not in sys.modules, "Prefect reads which API to use when it is imported"
        os.environ |= embedded_settings(directory, url)
    return _resume(run, flow_run, answer)


def _resume(run: str, flow_run: str, answer: Mapping[str, Any]) -> str:
    import httpx  # both after the settings of Prefect's environment
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            paused = client.read_flow_run(UUID(flow_run))
            if paused.state is None or not paused.state.is_paused():
                raise NothingWaits(run, f"its flow run is {paused.state_name}")
            reply = client.resume_flow_run(UUID(flow_run), run_input=dict(answer))
    except httpx.HTTPError as error:
        raise NothingWaits(run, f"the Prefect API does not answer: {error}") from error
    # Somebody else may have answered since the state was read.
    if reply.status.value != "ACCEPT":
        reason = getattr(reply.details, "reason", reply.status.value)
        raise NothingWaits(run, f"Prefect does not take the answer: {reason}")
    return str(paused.name)


def embedded_urls(directory: Path) -> Iterator[str]:
    """Yield the API addresses of the servers that live runs have embedded; they share one database."""
    for report in directory.glob("server-*.json"):
        process = report.stem.removeprefix("server-")
        if Path("/proc", process).exists():  # a run that was killed leaves its report behind
            yield f"{json.loads(report.read_text())['url']}/api"

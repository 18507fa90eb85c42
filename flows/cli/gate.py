"""The command gate: prints the decisions at the gates of a run, or answers a gate that waits."""

import getpass
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from configs.run import RunConfig
from configs.store import default_store
from flows.cli.arguments import StoreOption, UsageError, one_of, option
from flows.orchestration.gate_answers import decision_lines
from flows.orchestration.settings import configured_url, embedded_settings
from flows.queries.store_reader import recorded_run
from flows.reporting.formats import say
from flows.runtime.session import log_directory
from storage.read.frames import existing_store
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
    run: Annotated[str, option("the run, `latest` for the newest", "RUN")] = "latest",
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
    answered = approve or refuse
    if not answered and (by or reason):
        raise UsageError("--by and --reason belong to an answer: give --approve or --refuse")
    root = existing_store(store or default_store())
    name, config = recorded_run(root, run)
    if not answered:
        rows = decisions(root, name)
        for line in decision_lines(rows) or [f"run {name} has no decisions: gate.type is {config.gate.type}"]:
            say(line)
        return 0
    answer = {"approve": approve, "by": by or getpass.getuser(), "reason": reason}
    flow_run = _answer(root, name, config.model_copy(update={"store": store or config.store}), answer)
    say(f"{'approved' if approve else 'refused'} by {answer['by']}; run {name} ({flow_run}) goes on within seconds")
    return 0


def decisions(store: Store, run: str) -> list[Mapping[str, Any]]:
    """Return the decisions at the gates of a run in order of time, each with its step."""
    entries = store.ledger.entries(run=run, stage="gate")
    rows = [{"step": gate.step, **row} for gate in entries for row in store.read(gate.slices("decisions")).to_pylist()]
    return sorted(rows, key=lambda row: row["decided_at"])


def _answer(store: Store, run: str, config: RunConfig, answer: Mapping[str, Any]) -> str:
    """Give the answer to the flow run of the run's last event; return its name."""
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
    # Imported here: Prefect reads its settings from the environment when it is imported.
    import httpx
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

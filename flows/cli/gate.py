"""The command gate: prints the decisions at the gates of a run, or answers a gate that waits."""

import getpass
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from flows.cli.arguments import Json, RunOrLatest, StoreOption, UsageError, one_of, option, stored_run
from flows.cli.output import print_report
from flows.reporting.formats import say

if TYPE_CHECKING:
    from storage.store import Store

ANSWER = one_of()


class NothingWaits(ValueError):
    """No flow run of that name waits for an answer."""

    def __init__(self, run: str, why: str) -> None:
        super().__init__(
            f"run {run} does not wait for an answer: {why}. Nothing was changed; see: stagecoach show {run}"
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
    as_json: Json = False,
) -> int:
    """Print the decisions at a run's gates or, with `approve` or `refuse`, answer the gate that waits.

    Raises ConfigError for an unknown run, NothingWaits if no gate waits, LayoutError without a store.
    """
    from flows.runtime.session import log_directory

    if not (approve or refuse) and (by or reason):
        raise UsageError("--by and --reason belong to an answer: give --approve or --refuse")
    reader, name, config = stored_run(store, run)
    if approve or refuse:
        answer = {"approve": approve, "by": by or getpass.getuser(), "reason": reason}
        place = log_directory(config.model_copy(update={"store": store or config.store}))
        # The last event is of the process that works on the run; an earlier flow run of it has ended.
        flow_run = reader.store.runs.events(name)[-1].flow_run
        answered = _answer(name, flow_run or "", place.parent / "prefect", answer)
        say(f"{'approved' if approve else 'refused'} by {answer['by']}; run {name} ({answered}) goes on within seconds")
        return 0
    rows = decisions(reader.store, name)
    if as_json:
        print_report({"decisions": rows}, as_json)
        return 0
    for row in rows:
        reason = f": {row['reason']}" if row["reason"] else ""
        say(f"step {row['step']}: {'approved' if row['approved'] else 'refused'} by {row['decided_by']}{reason}")
    if not rows:
        say(f"run {name} has no decisions: gate.type is {config.gate.type}")
    return 0


def decisions(store: "Store", run: str) -> list[Mapping[str, Any]]:
    """Return the decisions at the gates of a run in order of time, each with its step."""
    entries = store.ledger.entries(run=run, stage="gate")
    rows = [{"step": gate.step, **row} for gate in entries for row in store.read(gate.slices("decisions")).to_pylist()]
    return sorted(rows, key=lambda row: row["decided_at"])


def _answer(run: str, flow_run: str, directory: Path, answer: Mapping[str, Any]) -> str:
    """Give the answer to a flow run, whose server may be one of `directory`; return the name of the flow run."""
    from flows.orchestration.settings import configured_url, embedded_settings

    if not configured_url():
        url = next(embedded_urls(directory), "")
        if not url:
            raise NothingWaits(run, "it is not running, or on another machine")
        os.environ |= embedded_settings(directory, url)
    import httpx  # both after the settings of Prefect's environment
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            paused = client.read_flow_run(UUID(flow_run)) if flow_run else None
            if paused is None or paused.state is None or not paused.state.is_paused():
                raise NothingWaits(run, f"its flow run is {paused.state_name if paused else 'unknown'}")
            reply = client.resume_flow_run(UUID(flow_run), run_input=dict(answer))
    except httpx.HTTPError as error:
        raise NothingWaits(run, f"the Prefect API does not answer: {error}") from error
    # Another person may have answered since the state was read.
    if reply.status.value != "ACCEPT":
        raise NothingWaits(
            run, f"Prefect does not take the answer: {getattr(reply.details, 'reason', reply.status.value)}"
        )
    return str(paused.name)


def embedded_urls(directory: Path) -> Iterator[str]:
    """Yield the API addresses of the servers that live runs have embedded; they share one database."""
    for report in directory.glob("server-*.json"):
        process = report.stem.removeprefix("server-")
        if Path("/proc", process).exists():  # a run that was killed leaves its report behind
            yield f"{json.loads(report.read_text())['url']}/api"

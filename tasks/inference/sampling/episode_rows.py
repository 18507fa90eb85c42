"""episode_rows: the rows of an episode, and the failure by which RolloutRunner decides about another attempt."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tasks.inference.sampling.seats import SeatClient, Seats
from tasks.inference.trace_rows.failures import Failure, failure_of_error
from tasks.inference.trace_rows.rows import (
    PLAYER_FIELD,
    RolloutOrigin,
    Row,
    error_columns,
    require_policies,
    rows_of_record,
    wire_record,
)

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode

KNOWN_ERROR_FIELD = "episode_error"
"""Field of a trace's info by which an environment says that it knew of a failure when it scored the other traces."""
Rows = tuple[list[Row], list[Row]]
"""Rows of traces and of messages."""


def episode_rows(
    episode: "WireEpisode", origin: RolloutOrigin, seats: Seats, client: SeatClient
) -> tuple[Rows | None, Failure | None]:
    """Return the rows of an episode, and the first cause of what went wrong in it.

    An agent's own error belongs to its own row: the other agents keep their rewards, since the environment went on to
    score them. There are two exceptions. Where the failed agent is never trained (a user, an opponent, a judge) and its
    model or machine failed, the others lose their rewards too, unless the environment scored them in that knowledge
    (KNOWN_ERROR_FIELD). And where the episode itself has an error, all lose them; what was earned so far stays in
    `rewards`. Where an environment retries episodes by itself, errors of its earlier tries look like an error of the
    episode and count as one if a trace failed.
    """
    traces, messages = [], []
    # Rows first, failures after: what one agent's row becomes depends on how all the others ended.
    for trace in episode.traces:
        record = wire_record(trace)
        if player := seats.names.get(record["agent"]["name"]):
            record["info"][PLAYER_FIELD] = player
        row, nodes = rows_of_record(record, origin, episode.id)
        traces.append(row | seats.trace_columns(record["agent"], client, origin))
        if origin.versions and traces[-1]["policy_key"]:
            require_policies(row, nodes)
        messages += nodes
    errors = episode.errors
    episode_failure = failure_of_error(errors[-1].model_dump()) if errors and not episode.ok else None
    if not traces:
        nothing = Failure("incomplete", "NoTrace", "the environment ran no agent and recorded no error")
        return None, episode_failure or nothing
    failures = [failure for row in traces if (failure := _row_failure(row))]
    # What the others follow from: an agent's error, then the episode's, then an unscored trace.
    errors_first = [*(each for each in failures if each.kind != "incomplete"), episode_failure, *failures]
    cause = next(filter(None, errors_first), None)
    shared_failure = episode_failure or _untrained_agent_failure(traces)
    for row, trace in zip(traces, episode.traces, strict=True):
        keeps_reward = episode_failure is None and (not row["trainable"] or KNOWN_ERROR_FIELD in trace.info)
        if shared_failure is not None and row["error_class"] is None and not keeps_reward:
            row |= {"reward": None, **error_columns(shared_failure)}
    return (traces, messages), cause


def _row_failure(row: Row) -> Failure | None:
    if row["error_class"] is None:
        return None
    return Failure(row["error_class"], row["error_type"], row["error_message"], row["error_traceback"])


def _untrained_agent_failure(traces: Iterable[Row]) -> Failure | None:
    """Return the first failure of a model or machine behind an agent that is never trained."""
    for row in traces:
        failure = None if row["trainable"] else _row_failure(row)
        if failure is not None and failure.retryable:
            return replace(failure, message=f"agent {row['agent']!r} of its episode failed: {failure.message}")
    return None

"""Ids of imported traces: one that a file has given is told apart from the same one of another rollout."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from tasks.exchange.episodes import Episode, Row, canonical, compact, digest
from tasks.exchange.traces import MARK, source_of

UNIQUE = re.compile(r"[0-9a-f]{24,}")
"""Ids by chance or by content, of 96 bits or more: nobody else has them. verifiers makes such."""
ID_LENGTH = 16
"""Hex characters of the content's digest in an id."""


def told_apart(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes with ids of traces that no other rollout has.

    An id such as `0` is unique within its file alone; it goes behind a digest of the trace's content. What the file
    said is kept in the trace's record. Lines of our own export keep their ids: the run that sampled them made these.
    """
    return [episode if episode.assignment is not None else _apart(episode) for episode in episodes]


def _apart(episode: Episode) -> Episode:
    new = {
        row["trace_id"]: _new_id(row, episode.messages)
        for row in episode.traces
        if not UNIQUE.fullmatch(row["trace_id"].replace("-", "").lower())
    }
    if not new:
        return episode
    return replace(
        episode,
        episode_id=new.get(episode.episode_id, episode.episode_id),
        traces=[_renamed(row, new[row["trace_id"]]) if row["trace_id"] in new else row for row in episode.traces],
        messages=[row | {"trace_id": new.get(row["trace_id"], row["trace_id"])} for row in episode.messages],
    )


def _new_id(row: Row, messages: Sequence[Row]) -> str:
    source = source_of(row, [message for message in messages if message["trace_id"] == row["trace_id"]])
    return f"{digest(canonical(source))[:ID_LENGTH]}-{row['trace_id']}"


def _renamed(row: Row, trace_id: str) -> Row:
    record = json.loads(row["record"])
    record[MARK] = {**record[MARK], "id": row["trace_id"]}
    return {**row, "trace_id": trace_id, "record": compact(record)}

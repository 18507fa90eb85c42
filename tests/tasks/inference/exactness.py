"""Token exactness: what went over the wire, against messages, samples and packed rows, element by element."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.advantage.stage import advantage
from tasks.filtering.stage import STAGE as FILTERING
from tasks.filtering.stage import filtering
from tasks.packing.stage import STAGE as PACKING
from tasks.packing.stage import packing
from tests.builders import view
from tests.tasks.inference.proxy import Call

Row = dict[str, Any]
Turn = tuple[list[int], list[int]]
"""The tokens that went in, and those that came out."""


def of_trace(rows: Sequence[Row], trace_id: str) -> list[Row]:
    """The messages of a trace, by number."""
    return sorted((row for row in rows if row["trace_id"] == trace_id), key=lambda row: row["message"])


def path(messages: Sequence[Row], leaf: int) -> list[int]:
    """Message numbers from the root to `leaf`."""
    parent = messages[leaf]["parent"]
    return [leaf] if parent is None else [*path(messages, parent), leaf]


def tokens(messages: Sequence[Row], leaf: int) -> tuple[list[int], list[bool]]:
    """The tokens along a branch, and which of them the model sampled."""
    numbers = path(messages, leaf)
    ids = [token for number in numbers for token in messages[number]["token_ids"]]
    return ids, [sampled for number in numbers for sampled in messages[number]["mask"]]


def turns(messages: Sequence[Row]) -> list[Turn]:
    """What every turn of a trace was sent and sampled, by the tables."""
    found = []
    for row in messages:
        if row["sampled"]:
            ids, _ = tokens(messages, row["message"])
            count = sum(row["mask"])
            found.append((ids[: len(ids) - count], ids[len(ids) - count :]))
    return found


def check_wire(calls: Sequence[Call], traces: Sequence[Row], messages: Sequence[Row]) -> int:
    """Check every turn of the traces against the calls of their sessions; return how many turns there were."""
    count = 0
    for trace in traces:
        own = [call for call in calls if call.session == trace["trace_id"] and call.status == 200]
        wire, recorded = [(call.sent, call.sampled) for call in own], turns(of_trace(messages, trace["trace_id"]))
        assert sorted(wire) == sorted(recorded), trace["trace_id"]
        assert len(wire) == trace["num_turns"]
        count += len(wire)
    return count


def packed(traces: pa.Table, messages: pa.Table, max_length: int) -> tuple[list[Row], list[Row]]:
    """Samples and packed rows that the stages after sampling make; every sampled token is to be learnt."""
    sections = {
        "algorithm": {"type": "supervised"},
        "filtering": {"filters": [{"type": "errored"}]},
        "packing": {"tokens_per_row": max_length},
    }
    tables = {"traces": traces, "messages": messages}
    tables |= filtering(tables, view(FILTERING, **sections), quarantined={})
    tables |= advantage(tables, view(ADVANTAGE, **sections))
    return tables["credits"].to_pylist(), packing(tables, view(PACKING, **sections))["batches"].to_pylist()


def check_packed(credits: Sequence[Row], batches: Sequence[Row], messages: Sequence[Row]) -> None:
    """Check that packed rows hold the tokens of the messages' branches, and that each sampled one is learnt once."""
    samples = {row["sample_id"]: row for row in credits}
    learnt: dict[tuple[str, int, int], int] = {}
    for batch in batches:
        for sample_id, (start, end) in zip(batch["sample_ids"], pairwise(batch["cu_seqlens"]), strict=False):
            sample = samples[sample_id]
            own = of_trace(messages, sample["trace_id"])
            ids, mask = tokens(own, sample["path"][-1])
            assert batch["token_ids"][start:end] == ids and sample["path"] == path(own, sample["path"][-1])
            weights = batch["ce_weights"][start:end]
            assert all(sampled for sampled, weight in zip(mask, weights, strict=True) if weight)
            places = [(number, at) for number in sample["path"] for at in range(len(own[number]["token_ids"]))]
            for (number, at), weight in zip(places, weights, strict=True):
                if weight:
                    key = sample["trace_id"], number, at
                    learnt[key] = learnt.get(key, 0) + 1
    sampled = {(row["trace_id"], row["message"], at) for row in messages for at, own in enumerate(row["mask"]) if own}
    assert learnt == dict.fromkeys(sampled, 1)

"""Tables in, credits out: what the tests of algorithms share."""

from collections.abc import Mapping, Sequence
from typing import Any

from storage.schemas.stage_tables import CREDITS
from storage.schemas.validation import RowPlace, check_rows
from tasks.advantage.stage import STAGE, advantage
from tests.builders import exchange, message, table, trace, verdict, view

Row = dict[str, Any]


def tables_of(
    traces: Sequence[Row], messages: Sequence[Row] | None = None, verdicts: Sequence[Row] | None = None
) -> dict[str, Any]:
    """Return what the advantage stage reads: by default, each trace is an exchange, kept unless it has an error."""
    if messages is None:
        messages = [row for one in traces for row in exchange(one["trace_id"])]
    if verdicts is None:
        verdicts = [
            verdict(one["trace_id"], group_id=one["group_id"], reason="errored" if one["error_class"] else None)
            for one in traces
        ]
    return {
        "traces": table("traces", traces),
        "messages": table("messages", messages),
        "verdicts": table("verdicts", verdicts),
    }


def credited(
    traces: Sequence[Row],
    messages: Sequence[Row] | None = None,
    verdicts: Sequence[Row] | None = None,
    environments: Mapping[str, Row] | None = None,
    step: int = 1,
    **section: Any,
) -> list[Row]:
    """Return the credits of these rows under an algorithm's section, grpo if none is given.

    `environments` are the sections of environments that have an algorithm of their own, by name. The step is not the
    first unless said so: only the first is judged by how many agents there are.
    """
    sections: dict[str, Any] = {"algorithm": section} if section else {}
    if environments:
        sections["environments"] = [
            {"name": name, "taskset": {"id": name}, "algorithm": own} for name, own in environments.items()
        ]
    credits = advantage(tables_of(traces, messages, verdicts), view(STAGE, **sections), step=step)["credits"]
    check_rows(credits, CREDITS, RowPlace("credits"))
    return credits.to_pylist()


def group(*rewards: float | None, group_id: str = "g0", **others: Any) -> list[Row]:
    """Return the traces of one group with these rewards; `others` are columns of all of them."""
    return [trace(f"{group_id}-{i}", group_id=group_id, reward=reward, **others) for i, reward in enumerate(rewards)]


def advantages(rows: Sequence[Row]) -> list[float | None]:
    """Return the advantage of each credit."""
    return [row["advantage"] for row in rows]


def forked(trace_id: str) -> list[Row]:
    """Return the messages of a forked trace: 1 answers 0; 2 and 4 go on after it, each answered by the next; the
    answers, 2 + 1 + 2 tokens, are sampled."""
    return [
        message(trace_id, 0, tokens=[1, 2]),
        message(trace_id, 1, parent=0, tokens=[3, 4], sampled=True),
        message(trace_id, 2, parent=1, tokens=[5]),
        message(trace_id, 3, parent=2, tokens=[6], sampled=True),
        message(trace_id, 4, parent=1, tokens=[7]),
        message(trace_id, 5, parent=4, tokens=[8, 9], sampled=True),
    ]

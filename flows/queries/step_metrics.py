"""Reads the metrics of finished steps: the rows of table `metrics`, and what the ledger says of their stages.

Nothing is computed here that a row could say. Only wall-clock is of the ledger, for it is of one attempt at some work:
`timing/stage/...` in seconds, `tokens/stage/...`, and `tokens_per_second/...` of stages that handled tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.read.frames import Frames
from storage.read.lineage import Work
from tasks.metrics.figures import Values


@dataclass(frozen=True)
class Span:
    """What the ledger says of one piece of finished work, or of all of a stage."""

    stage: str
    seconds: float
    tokens: int


def read_metrics(frames: Frames, works: Iterable[Work]) -> dict[str, Values]:
    """Return the metrics that some works have written, by key, in one look at the table; of other works none."""
    found: dict[str, Values] = {}
    rows = frames.rows(works, "metrics").select("key", "scope", "name", "value").collect()
    for key, scope, name, value in rows.iter_rows():
        found.setdefault(key, {})[scope, name] = value
    return found


def ledger_metrics(spans: Sequence[Span]) -> Values:
    """Return seconds, tokens and tokens a second of the stages of a step."""
    found: Values = {}
    for stage, span in by_stage(spans).items():
        found["", f"timing/stage/{stage}"] = span.seconds
        if span.tokens:
            found["", f"tokens/stage/{stage}"] = float(span.tokens)
        if span.tokens and span.seconds > 0:
            found["", f"tokens_per_second/{stage}"] = span.tokens / span.seconds
    return found


def by_stage(spans: Iterable[Span]) -> dict[str, Span]:
    """Return the sums of each stage, in the order in which the stages come first."""
    found: dict[str, Span] = {}
    for span in spans:
        known = found.get(span.stage, Span(span.stage, 0.0, 0))
        found[span.stage] = Span(span.stage, known.seconds + span.seconds, known.tokens + span.tokens)
    return found

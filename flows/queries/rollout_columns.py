"""The columns of a list of rollouts: names, headings, and how values are written."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import polars as pl

from flows.queries.request import BadQuestion

REWARD, METRIC = "reward:", "metric:"
"""What the columns of named rewards and metrics begin with."""


@dataclass(frozen=True)
class RolloutColumn:
    """One column: its name in addresses, commands and frames, its heading, what its values are, and what it means."""

    name: str
    title: str
    kind: str
    """text, whole, number, signed, seconds, flag, moment or names; what is no text is right-aligned."""
    meaning: str
    usual: bool = True
    """Whether it is shown where nobody chose columns."""


COLUMNS = (
    RolloutColumn("trace_id", "trace", "text", "the trace"),
    RolloutColumn("group_id", "group", "text", "rollouts of one example that are compared with each other"),
    RolloutColumn("example_id", "example", "text", "the example tried"),
    RolloutColumn("environment", "environment", "text", "the environment"),
    RolloutColumn("agent", "agent", "text", "the agent's seat in the environment"),
    RolloutColumn("reward", "reward", "number", "total reward; none where scoring did not run"),
    RolloutColumn("advantage", "advantage", "signed", "reward minus baseline, as the algorithm has it"),
    RolloutColumn("outcome", "outcome", "text", "what became of it"),
    RolloutColumn("detail", "by", "text", "the filter or the class of error that decided its outcome"),
    RolloutColumn("detected", "found by", "names", "filters that found something, also those that only report"),
    RolloutColumn("error_type", "error", "text", "the type of the exception"),
    RolloutColumn("stop_condition", "stopped by", "text", "what ended the rollout"),
    RolloutColumn("num_turns", "turns", "whole", "sampled messages"),
    RolloutColumn("num_input_tokens", "tokens in", "whole", "tokens fed in, each once"),
    RolloutColumn("num_output_tokens", "tokens out", "whole", "tokens sampled"),
    RolloutColumn("is_truncated", "truncated", "flag", "ended by a limit on tokens or turns"),
    RolloutColumn("policy_version", "policy", "whole", "the version of the policy that sampled it"),
    RolloutColumn("staleness", "stale by", "whole", "the step minus that version"),
    RolloutColumn("setup_seconds", "set-up", "seconds", "wall-clock of set-up"),
    RolloutColumn("generation_seconds", "generation", "seconds", "wall-clock of the agent, model calls included"),
    RolloutColumn("scoring_seconds", "scoring", "seconds", "wall-clock of scoring"),
    RolloutColumn("num_branches", "branches", "whole", "root-to-leaf paths of its messages"),
    RolloutColumn("place", "place", "whole", "its place in the order in which rollouts were handed over", False),
    RolloutColumn("baseline", "baseline", "number", "what was subtracted from the reward", False),
    RolloutColumn("mismatch_kl", "mismatch KL", "number", "of the learner against the engine, its tokens' mean", False),
    RolloutColumn("reason", "left out by", "text", "the filter that decided against it", False),
    RolloutColumn("error_class", "error class", "text", "whose fault the error was", False),
    RolloutColumn("error_message", "error text", "text", "the text of the exception", False),
    RolloutColumn("trained", "trained", "flag", "whether a policy was trained on it", False),
    RolloutColumn("trainable", "trainable", "flag", "whether its tokens are the policy's", False),
    RolloutColumn("num_samples", "samples", "whole", "training samples made of it", False),
    RolloutColumn("num_tokens", "tokens", "whole", "tokens fed in and sampled", False),
    RolloutColumn("model_seconds", "model", "seconds", "wall-clock of model calls alone", False),
    RolloutColumn("seconds", "seconds", "seconds", "wall-clock of set-up, generation and scoring", False),
    RolloutColumn("temperature", "temperature", "number", "sampling temperature", False),
    RolloutColumn("policy_key", "policy key", "text", "the policy that sampled it", False),
    RolloutColumn("started_at", "started", "moment", "when it began", False),
    RolloutColumn("assignment_id", "assignment", "text", "the assignment that it answers", False),
    RolloutColumn("episode_id", "episode", "text", "the environment run that made it", False),
    RolloutColumn("set", "set", "text", "the set of held-out examples", False),
    RolloutColumn("round", "round", "whole", "the round of the evaluation; later ones try again what failed", False),
    RolloutColumn("replaced", "made again", "flag", "whether a later round made it again", False),
)
"""In the order in which they are shown."""
LEFT = ("text", "names")
"""The kinds whose values stand at the left."""


def column(name: str, frame: pl.DataFrame) -> RolloutColumn:
    """Return a column of a list of traces by its name or heading: one of COLUMNS, `reward:NAME` or `metric:NAME`.

    Raises BadQuestion, which names those that there are.
    """
    for each in COLUMNS:
        if name in (each.name, each.title) and each.name in frame.columns:
            return each
    for start, table in ((REWARD, "rewards"), (METRIC, "metrics")):
        if name.startswith(start) and name != start:
            return RolloutColumn(name, name.removeprefix(start), "number", f"of the {table} that have names", False)
    known = ", ".join(each.name for each in COLUMNS if each.name in frame.columns)
    raise BadQuestion(f"there is no column {name!r}; there are {known}, and {REWARD}NAME and {METRIC}NAME")


def columns(names: Sequence[str], frame: pl.DataFrame) -> list[RolloutColumn]:
    """Return the columns of some names, each once and the trace's first.

    Without names, the usual ones, but for those in which no trace has a value, as of errors, where there was none, and
    for that of the agents where there is one alone.
    """
    if not names:
        told = [each for each in COLUMNS if each.usual and _says_anything(frame[each.name])]
        return [each for each in told if each.name != "agent" or frame["agent"].n_unique() > 1]
    return [column(name, frame) for name in dict.fromkeys(("trace_id", *names))]


def _says_anything(values: pl.Series) -> bool:
    there = values.drop_nulls()
    if there.dtype == pl.List:
        return bool((there.list.len() > 0).any())
    return bool((there != "").any()) if there.dtype == pl.String else not there.is_empty()


def read_names(text: str) -> tuple[str, ...]:
    """Return the names of a list of columns; commas in names are written %2C."""
    return tuple(unquote(each.strip()) for each in text.split(",") if each.strip())


def written_names(names: Iterable[str]) -> str:
    """Return names of columns as `read_names` reads them."""
    return ",".join(quote(name, safe=":_-./()[]") for name in names)


def named_columns(frame: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the columns of named rewards and metrics with how many traces have each, the most frequent first."""
    found: Counter[str] = Counter()
    for start, table in ((REWARD, "rewards"), (METRIC, "metrics")):
        # Rollouts of one environment say the same names again and again: each text is parsed once.
        for text, times in frame[table].value_counts().iter_rows():
            found.update({start + name: times for name in parsed(text)})
    return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))


def with_named(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Return the frame with the columns of named rewards and metrics added that are among `names`."""
    asked = dict.fromkeys(name for name in names if name.startswith((REWARD, METRIC)))
    for name in asked:
        table, key = (
            ("rewards", name.removeprefix(REWARD))
            if name.startswith(REWARD)
            else (
                "metrics",
                name.removeprefix(METRIC),
            )
        )
        values = [_number(parsed(text).get(key)) for text in frame[table]]
        frame = frame.with_columns(pl.Series(name, values, pl.Float64))
    return frame


def parsed(text: str | None) -> dict[str, Any]:
    """Return what is said by name in JSON, nothing where it is no such thing: others wrote it."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    """Return a named reward's score, or a metric's number."""
    said = value.get("score") if isinstance(value, dict) else value
    return float(said) if isinstance(said, (int, float)) else None

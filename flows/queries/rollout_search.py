"""Searches all rollouts of a run: which meet a condition, and which phrases replies gained or lost between policies.

Replies to one example share its words, so a phrase counts only in MIN_EXAMPLES examples or more, and the error of a
share is clustered by example. Each phrase has a condition (`flows.queries.conditions`) that finds its rollouts.
"""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from threading import Event
from typing import Any

import polars as pl
from polars.exceptions import ComputeError

from flows.queries.conditions import Condition, Pattern, any_case, matching_rows
from flows.queries.request import NotThere
from flows.queries.rollouts import rollout_columns
from flows.queries.store_reader import StoreReader
from storage.read.views import quote, select
from tasks.metrics.warnings import MAX_CHARACTERS, MAX_REPLIES, MAX_TEXT, MIN_EXAMPLES, phrases_of

AROUND = 140
"""Characters on each side of a match that are shown, at most."""
SHOWN = ("reward", "advantage", "outcome", "detail", "length", "environment", "example_id")
"""Columns of a hit that are returned beside its text."""
_COUNTS = """
select for_training, step, count(*)::bigint as num_rollouts, count(hits.key)::bigint as num_hits
from rollouts
left join hits using (key, trace_id)
group by for_training, step
order by for_training desc, step
"""


@dataclass(frozen=True)
class Hits:
    """The rollouts of a run that meet a condition."""

    rows: pl.DataFrame
    """By step and in recorded order: run, step, for_training, trace_id, key, and what the condition speaks of."""
    counts: pl.DataFrame
    """For each step, evaluations behind steps of training: step, for_training, num_rollouts, num_hits."""

    @property
    def first_step(self) -> int | None:
        """The first step of training with a hit."""
        steps = self.counts.filter("for_training", pl.col("num_hits") > 0)["step"]
        return None if steps.is_empty() else int(steps[0])


def run_rollouts(
    reader: StoreReader, run: str, columns: Collection[str], keys: Collection[str] | None = None
) -> pl.DataFrame:
    """Return some columns of all rollouts of a run, or of those that some work made; what was read is held.

    Raises NotThere for an unknown run.
    """
    lineages = [one for one in reader.history(run).lineages if keys is None or one.traces.key in keys]
    return rollout_columns(reader, run, lineages, columns)


def search_run(reader: StoreReader, run: str, condition: Condition, reader_gone: Event | None = None) -> Hits:
    """Return the rollouts of a run that meet a condition, and how many of each step do.

    They are those that `stagecoach quarantine --run RUN --where` marks. Raises NotThere and BadCondition, which ends
    the search once `reader_gone` is set.
    """
    rows = run_rollouts(reader, run, {"run", "step", "for_training", "trace_id", "key"} | condition.columns)
    hits = matching_rows(rows, condition, reader_gone)
    names = ["key", "trace_id", "step", "for_training"]
    frames = {"rollouts": lambda: rows.select(names), "hits": lambda: hits.select(names[:2])}
    return Hits(hits, select(frames, _COUNTS))


def filter_traces(reader: StoreReader, run: str, frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """Return the traces of a frame, as `rollouts.traces_of` has it, that meet a condition. Raises BadCondition."""
    condition, by = Condition(where), ["key", "trace_id"]
    rows = run_rollouts(reader, run, {*by, *condition.columns}, set(frame["key"]))
    return frame.join(matching_rows(rows, condition), on=by, how="semi", maintain_order="left")


def describe_hits(reader: StoreReader, run: str, hits: pl.DataFrame, condition: Condition) -> list[dict[str, Any]]:
    """Return some hits with their outcomes and the text around a match; see `text_around`.

    Where nothing was searched for in a text, it is the beginning of the reply.
    """
    names, patterns = ["key", "trace_id"], condition.patterns or (Pattern("reply", ""),)
    # What the condition speaks of has been read.
    missing = {*SHOWN, *(pattern.column for pattern in patterns)} - set(hits.columns)
    more = run_rollouts(reader, run, {*names, *missing}, set(hits["key"]))
    rows = hits.join(more, on=names, how="left", maintain_order="left").to_dicts()
    return [
        {name: row[name] for name in ("trace_id", "key", "step", "for_training", *SHOWN)}
        | {"piece": text_around(row, patterns)}
        for row in rows
    ]


def text_around(row: dict[str, Any], patterns: Collection[Pattern]) -> dict[str, str]:
    """Return the text around the first match of a pattern: column, before, match and after.

    Without a match, as of a condition with `or`, the begin of the first pattern's column is before it.
    """
    for pattern in patterns:
        around = f"(?s)(?P<before>.{{0,{AROUND}}}?)(?P<match>(?-s){pattern.regex})(?s)(?P<after>.{{0,{AROUND}}})"
        try:  # polars' expressions take time linear in the text, as the database's do
            parts = pl.Series([row[pattern.column] or ""]).str.extract_groups(around)[0]
        except ComputeError:  # polars does not know all of RE2: then nothing is marked
            continue
        if parts["match"]:
            return {"column": pattern.column, **{name: parts[name] for name in ("before", "match", "after")}}
    column = next(iter(patterns)).column
    return {"column": column, "before": (row[column] or "")[: 2 * AROUND], "match": "", "after": ""}


def commands(run: str, condition: Condition, store: str) -> dict[str, str]:
    """Return what is typed in a terminal to work with the same rollouts, by command."""
    where = f"from {quote(run)}.rollouts where ({condition.text})"
    to_file = ("--format", "verifiers", "--to", "hits.jsonl")
    typed = {
        "quarantine": ["quarantine", "--run", run, "--where", condition.text, "--reason", "found by search"],
        "traces": ["traces", run, "--where", condition.text],
        "sql": ["sql", f"select step, trace_id, reward, reply {where} order by step"],
        "export": ["export", run, "--where", condition.text, "--quarantined", *to_file],
    }
    return {name: shlex.join(["stagecoach", *words, "--store", store]) for name, words in typed.items()}


COLUMNS = ("key", "for_training", "policy_version", "environment", "example_id", "reply")
MAX_PHRASES, MIN_SIGMAS = 15, 3.0
"""Phrases gained or lost that are returned, and standard errors by which two shares differ: less may be chance."""
# The variance of the difference is the sum over all examples of the square of (b - share_b * size_b) / num_b less
# (a - share_a * size_a) / num_a, also over those without the phrase, with m / (m - 1) for m examples: it is robust to
# clusters, which both policies may share (Liang and Zeger 1986). With x = b / num_b - a / num_a, only sums over
# examples with the phrase are needed. The error is the larger one of that and of independent replies. Of equally sure
# phrases the longest says most.
_CHANGES = """
with sizes as (
    select example, count(*) filter (side = 'a') as size_a, count(*) filter (side = 'b') as size_b
    from replies group by example
),
totals as (
    select sum(size_a) as num_a, sum(size_b) as num_b, count(*) as m, sum(size_a * size_a) / (num_a * num_a) as aa,
        sum(size_b * size_b) / (num_b * num_b) as bb, sum(size_a * size_b) / (num_a * num_b) as ab
    from sizes
),
phrases as (select side, example, unnest(phrases) as phrase from replies),
counts as (
    select example, phrase, count(*) filter (side = 'a') as a, count(*) filter (side = 'b') as b
    from phrases group by example, phrase
),
shares as (
    select phrase, sum(a)::bigint as a, sum(b)::bigint as b,
        count(*) filter (a > 0) as examples_a, count(*) filter (b > 0) as examples_b,
        sum(a) / any_value(num_a) as share_a, sum(b) / any_value(num_b) as share_b,
        sum(x * x) as xx, sum(x * size_a / num_a) as xa, sum(x * size_b / num_b) as xb
    from (select *, b / num_b - a / num_a as x from counts join sizes using (example), totals)
    where num_a > 0 and num_b > 0
    group by phrase
    having greatest(count(*) filter (a > 0), count(*) filter (b > 0)) >= $examples
),
errors as (
    select *, xx - 2 * (share_b * xb - share_a * xa) + share_b * share_b * bb + share_a * share_a * aa
            - 2 * share_a * share_b * ab as variance, m / (m - 1) * variance as of_examples,
        (a + b + 1) / (num_a + num_b + 2) as pooled, pooled * (1 - pooled) * (1 / num_a + 1 / num_b) as of_replies,
        (share_b - share_a) / sqrt(greatest(of_examples, of_replies)) as sigmas
    from shares, totals
)
select phrase, a, b, examples_a, examples_b, share_a, share_b, sigmas > 0 as gained from errors
where abs(sigmas) >= $sigmas and if(sigmas > 0, examples_b, examples_a) >= $examples
order by abs(sigmas) desc, length(phrase) desc, phrase
"""


def policy_versions(reader: StoreReader, run: str) -> list[int]:
    """Return the versions of the policies that sampled a run's rollouts for training. Raises NotThere."""
    rows = run_rollouts(reader, run, ("for_training", "policy_version"))
    return sorted(rows.filter("for_training")["policy_version"].unique().to_list())


def policy_changes(reader: StoreReader, run: str, a: int, b: int) -> dict[str, Any]:
    """Return what changed from policy `a` to policy `b` of a run, in rollouts for training.

    `counts`: rollouts of each; `gained` and `lost`: phrase, how many replies of a and of b hold it (a, b), of how many
    examples (examples_a, examples_b), their shares (share_a, share_b), and condition; what differs most comes first.
    Raises NotThere for a version that sampled nothing.
    """
    versions = policy_versions(reader, run)
    for version in (a, b):
        if version not in versions:
            known = ", ".join(map(str, versions[:50]))
            raise NotThere(f"policy {version} sampled no rollout of run {run!r}; there are {known}")
    sampled = pl.col("for_training") & pl.col("policy_version").is_in([a, b])
    keys = run_rollouts(reader, run, COLUMNS[:3]).filter(sampled)["key"]
    rows = run_rollouts(reader, run, COLUMNS, set(keys)).filter(sampled)
    sides = [rows.filter(policy_version=version) for version in (a, b)]
    replies = pl.concat(_replies(side, name) for side, name in zip(sides, "ab", strict=True))
    replies = replies.with_columns(pl.col("example").rank("dense"))
    relations = {"replies": lambda: replies}
    phrases = select(relations, _CHANGES, sigmas=MIN_SIGMAS, examples=MIN_EXAMPLES)
    parts = {name: _lines(phrases.filter(gained=gained)) for name, gained in (("gained", True), ("lost", False))}
    return {"counts": [side.height for side in sides], **parts}


def _replies(rows: pl.DataFrame, side: str) -> pl.DataFrame:
    text = pl.col("reply").str.head(MAX_CHARACTERS).str.to_lowercase()
    read = rows.drop_nulls("reply").head(MAX_REPLIES).with_columns(text)
    return read.filter(pl.col("reply").str.len_chars().cum_sum() <= MAX_TEXT).select(
        side=pl.lit(side),
        example=pl.struct("environment", "example_id"),
        phrases=pl.col("reply").map_elements(phrases_of, return_dtype=pl.List(pl.String)),
    )


def _lines(phrases: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the first phrases, without those that stand within an earlier one, or around it."""
    lines: list[dict[str, Any]] = []
    for row in phrases.drop("gained").to_dicts():
        text = row["phrase"]
        if len(lines) < MAX_PHRASES and not any(text in line["phrase"] or line["phrase"] in text for line in lines):
            lines.append({**row, "condition": f"reply ~* {any_case(text)}"})
    return lines

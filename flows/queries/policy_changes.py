"""policy_changes: phrases that the replies of a run gained and lost between two of its policies.

Replies to one example share its words, so a phrase counts only in MIN_EXAMPLES examples or more, and the error of a
share is clustered by example. Each phrase has a condition (`flows.queries.conditions`) that finds its rollouts.
"""

import re
from typing import Any

import polars as pl

from flows.queries.conditions import any_case
from flows.queries.request import NotThere
from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader
from storage.read.views import select

COLUMNS = ("key", "for_training", "policy_version", "environment", "example_id", "reply")
MAX_REPLIES, MAX_CHARACTERS = 1000, 4000
"""Replies of a policy that are read, the first ones, and characters of each."""
MAX_WORDS, MAX_PHRASES = 5, 15
"""Words of a phrase, and phrases gained or lost that are returned."""
MIN_SIGMAS, MIN_EXAMPLES = 3.0, 3
"""Standard errors by which two shares differ, and examples that a phrase is in: less may be chance."""
# A tag is one word, so that `<answer></answer>` is a phrase of two.
_WORDS = re.compile(r"</?[A-Za-z][^<>\s]{0,40}>|\w+(?:['\u2019]\w+)*|[^\w\s]")
_AT_ENDS = re.compile(r"^[^\w\s<]+\s*[\w<]|[\w>]\s*[^\w\s>]+$")
"""Marks at the ends of a phrase of words: they come with every sentence."""
# The cluster-robust variance of a share is the sum over all examples of (n - share * size)^2, also over those without
# the phrase (Liang and Zeger 1986), with m / (m - 1) for m clusters: the examples of each policy. The error of a
# difference is the larger one of that and of independent replies. Of equally sure phrases the longest says most.
_CHANGES = """
with sizes as (select side, example, count(*) as size from replies group by all),
totals as (
    select side, sum(size) as num, count(*) as clusters, sum(size * size) as squares from sizes group by all
),
phrases as (select side, example, unnest(phrases) as phrase from replies),
counts as (select side, example, phrase, count(*) as n from phrases group by all),
shares as (
    select phrase, side, num, sum(n) as held, count(*) as examples, held / num as share,
        (sum(n * n) - 2 * share * sum(n * size) + share * share * any_value(squares)) / (num * num) as variance
    from counts join sizes using (side, example) join totals using (side) group by phrase, side, num
),
pairs as (
    select phrase, coalesce(a.held, 0)::bigint as a, coalesce(b.held, 0)::bigint as b,
        coalesce(a.examples, 0) as examples_a, coalesce(b.examples, 0) as examples_b,
        coalesce(a.share, 0) as share_a, coalesce(b.share, 0) as share_b,
        coalesce(a.variance, 0) + coalesce(b.variance, 0) as clustered
    from (from shares where side = 'a') as a full join (from shares where side = 'b') as b using (phrase)
),
errors as (
    select *, m / (m - 1) * clustered as of_examples, (a + b + 1) / (num + 2) as pooled,
        pooled * (1 - pooled) * inverse as of_replies,
        (share_b - share_a) / sqrt(greatest(of_examples, of_replies)) as sigmas
    from pairs, (select sum(clusters) as m, sum(num) as num, sum(1 / num) as inverse from totals)
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
    relations = {"replies": lambda: replies}
    phrases = select(relations, _CHANGES, sigmas=MIN_SIGMAS, examples=MIN_EXAMPLES)
    parts = {name: _lines(phrases.filter(gained=gained)) for name, gained in (("gained", True), ("lost", False))}
    return {"counts": [side.height for side in sides], **parts}


def phrases_of(text: str) -> list[str]:
    """Return the phrases of a reply, those on one line, as they are written."""
    words = [match.span() for match in _WORDS.finditer(text)]
    spans = (zip(words, words[length:], strict=False) for length in range(MAX_WORDS))
    phrases = {text[first[0] : last[1]] for pairs in spans for first, last in pairs}
    return [phrase for phrase in phrases if "\n" not in phrase and not _AT_ENDS.search(phrase)]


def _replies(rows: pl.DataFrame, side: str) -> pl.DataFrame:
    text = pl.col("reply").str.head(MAX_CHARACTERS).str.to_lowercase()
    return (
        rows.drop_nulls("reply")
        .head(MAX_REPLIES)
        .select(
            side=pl.lit(side),
            example=pl.struct("environment", "example_id"),
            phrases=text.map_elements(phrases_of, return_dtype=pl.List(pl.String)),
        )
    )


def _lines(phrases: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the first phrases, without those that stand within an earlier one, or around it."""
    lines: list[dict[str, Any]] = []
    for row in phrases.drop("gained").to_dicts():
        text = row["phrase"]
        if len(lines) < MAX_PHRASES and not any(text in line["phrase"] or line["phrase"] in text for line in lines):
            lines.append({**row, "condition": f"reply ~* {any_case(text)}"})
    return lines

"""What changed in a run's replies between two of its policies: phrases gained and lost, length, repetition, format.

Each line has a condition (`flows.queries.conditions`) that finds its rollouts in the whole run.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any

import polars as pl

from flows.queries.conditions import any_case, sql_text
from flows.queries.request import NotThere
from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader

COLUMNS = (
    *("step", "key", "trace_id", "for_training", "policy_version", "reward", "length", "is_truncated", "reply"),
    *("environment", "example_id"),
)
MOST_REPLIES, MOST_CHARACTERS = 1000, 8000
"""Replies of a policy that are looked at for phrases, the first ones, and characters of each."""
LONGEST_PHRASE, MOST_PHRASES = 5, 15
"""Words of a phrase, and phrases of each kind that are returned."""
SURE = 3.0
"""Standard errors by which two shares have to differ: a smaller difference may be chance."""
LEAST_EXAMPLES = 3
"""Examples in whose replies a phrase has to be: rollouts of one example are not independent of each other."""
FORMATS = {
    "tags": r"</?[A-Za-z][^<>\n]{0,40}>",
    "empty tags": r"<([A-Za-z]\w*)></",
    "code blocks": "```",
    "list items": r"(^|\n)\s*([-*]|\d+[.)])\s",
    "headings": r"(^|\n)#+ ",
    "boxed answers": r"\\boxed",
    "questions": r"\?",
}
"""What a reply may be written in: a regular expression for each."""
# A tag is one word, so that `<answer></answer>` is a phrase of two.
_AT_ENDS = re.compile(r"^[^\w\s<]+\s*[\w<]|[\w>]\s*[^\w\s>]+$")
"""What a phrase of words does not begin or end with: marks, which come with every sentence."""
_WORDS = re.compile(r"</?[A-Za-z][^<>\s]{0,40}>|\w+(?:['\u2019]\w+)*|[^\w\s]")


def policy_versions(reader: StoreReader, run: str) -> list[int]:
    """Return the versions of the policies that sampled a run's rollouts for training. Raises NotThere."""
    rows = run_rollouts(reader, run, ("for_training", "policy_version"))
    return sorted(rows.filter("for_training")["policy_version"].unique().to_list())


def policy_changes(reader: StoreReader, run: str, a: int, b: int) -> dict[str, Any]:
    """Return what changed from policy `a` to policy `b` of a run, in rollouts for training.

    `counts`: rollouts of each; `measures`: name, a, b, is_share and condition; `gained` and `lost`: phrase, how many
    replies of a and of b hold it (a, b), of how many examples (examples_a, examples_b), their shares, and condition,
    what differs most first. Raises NotThere for a version that sampled nothing.
    """
    named = run_rollouts(reader, run, ("key", "for_training", "policy_version"))
    keys = named.filter(pl.col("for_training") & pl.col("policy_version").is_in([a, b]))["key"]
    rows = run_rollouts(reader, run, COLUMNS, set(keys)) if len(keys) else named.clear()
    own = [rows.filter(pl.col("for_training") & (pl.col("policy_version") == version)) for version in (a, b)]
    for version, each in zip((a, b), own, strict=True):
        if each.is_empty():
            known = ", ".join(map(str, policy_versions(reader, run)[:50]))
            raise NotThere(f"policy {version} sampled no rollout of run {run!r}; there are {known}")
    first, second = (_replies(each) for each in own)
    gained, lost = _phrases(first, second)
    counts = [each.height for each in own]
    return {"counts": counts, "measures": _measures(own[0], own[1], b), "gained": gained, "lost": lost}


Replies = Sequence[tuple[tuple[str, str], str]]
"""Environment and id of an example, and a reply to it."""


def _replies(rows: pl.DataFrame) -> Replies:
    replies = rows.drop_nulls("reply").head(MOST_REPLIES)
    columns = (replies[name].to_list() for name in ("environment", "example_id", "reply"))
    return [((name, example), text[:MOST_CHARACTERS].lower()) for name, example, text in zip(*columns, strict=True)]


def _measures(first: pl.DataFrame, second: pl.DataFrame, version: int) -> list[dict[str, Any]]:
    """Return reward, length, repetition and formats of both; a line's condition holds for the second's rollouts."""
    of_policy = f"for_training and policy_version = {version}"
    reply = pl.col("reply").fill_null("")
    measures: list[tuple[str, pl.Expr, bool, str]] = [
        ("reward", pl.col("reward").mean(), False, of_policy),
        ("length in tokens", pl.col("length").mean(), False, of_policy),
        ("truncated", pl.col("is_truncated").mean(), True, f"{of_policy} and is_truncated"),
        ("no reply", (reply == "").mean(), True, f"{of_policy} and coalesce(reply, '') = ''"),
    ]
    measures += [
        (name, reply.str.contains(pattern).mean(), True, f"{of_policy} and reply ~ {sql_text(pattern)}")
        for name, pattern in FORMATS.items()
    ]
    found = [
        {
            "name": name,
            "a": first.select(how).item(),
            "b": second.select(how).item(),
            "is_share": share,
            "condition": where,
        }
        for name, how, share, where in measures
    ]
    repeated = [_repetition(_replies(each)) for each in (first, second)]
    found.insert(
        4, {"name": "repeated phrases", "a": repeated[0], "b": repeated[1], "is_share": True, "condition": of_policy}
    )
    # A format that neither of them writes says nothing.
    return [each for each in found if each["name"] not in FORMATS or each["a"] or each["b"]]


def _repetition(replies: Replies) -> float | None:
    """Return the share of phrases of three words that a reply had before, averaged over replies with any."""
    shares = []
    for _, text in replies:
        phrases = [text[begin:end] for begin, end in _spans(text, 3, 3)]
        if phrases:
            shares.append(1 - len(set(phrases)) / len(phrases))
    return sum(shares) / len(shares) if shares else None


def _spans(text: str, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield where the phrases of some words begin and end in a text."""
    words = [found.span() for found in _WORDS.finditer(text)]
    for length in range(least, most + 1):
        for at in range(len(words) - length + 1):
            yield words[at][0], words[at + length - 1][1]


def _phrases_of(text: str) -> set[str]:
    """Return the phrases of a reply, those on one line, as they are written."""
    phrases = {text[begin:end] for begin, end in _spans(text, 1, LONGEST_PHRASE)}
    return {phrase for phrase in phrases if "\n" not in phrase and not _AT_ENDS.search(phrase)}


def _phrases(first: Replies, second: Replies) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the phrases whose share of replies grew, and those whose share fell, the surest first."""
    counts = [Counter(phrase for _, text in own for phrase in _phrases_of(text)) for own in (first, second)]
    sizes = len(first), len(second)
    # Errors of independent replies are the least that there are: most phrases need no count by example.
    candidates = {
        phrase
        for phrase in counts[0].keys() | counts[1].keys()
        if abs(_difference(counts, sizes, phrase)) >= SURE * _independent_error(counts, sizes, phrase)
    }
    by_example = [_counts_by_example(own, candidates) for own in (first, second)]
    num_replies = [Counter(example for example, _ in own) for own in (first, second)]
    scored = []
    for phrase in candidates:
        held = by_example[0].get(phrase, Counter()), by_example[1].get(phrase, Counter())
        error = max(_independent_error(counts, sizes, phrase), _clustered_error(held, num_replies))
        score = _difference(counts, sizes, phrase) / error
        if abs(score) >= SURE and len(held[score > 0]) >= LEAST_EXAMPLES:
            scored.append((score, phrase, held))
    # Of those that are equally sure the longest comes first: it says more.
    scored.sort(key=lambda each: (-abs(each[0]), -len(each[1]), each[1]))
    grown, fallen = ([each for each in scored if (each[0] > 0) == grew] for grew in (True, False))
    return _phrase_lines(grown, sizes), _phrase_lines(fallen, sizes)


Counts = Sequence[Counter[Any]]
"""A count of each policy."""


def _counts_by_example(replies: Replies, phrases: Set[str]) -> dict[str, Counter[Any]]:
    counts: dict[str, Counter[Any]] = {}
    for example, text in replies:
        for phrase in _phrases_of(text) & phrases:
            counts.setdefault(phrase, Counter())[example] += 1
    return counts


def _difference(counts: Counts, sizes: tuple[int, int], phrase: str) -> float:
    return counts[1][phrase] / sizes[1] - counts[0][phrase] / sizes[0] if all(sizes) else 0.0


def _independent_error(counts: Counts, sizes: tuple[int, int], phrase: str) -> float:
    """Return the standard error of the difference of two shares, as if both were one and replies independent."""
    both = (counts[0][phrase] + counts[1][phrase] + 1) / (sum(sizes) + 2)
    return math.sqrt(both * (1 - both) * sum(1 / size for size in sizes if size))


def _clustered_error(held: Counts, num_replies: Counts) -> float:
    """Return the standard error of the difference of two shares whose replies are alike within an example.

    `held` and `num_replies` are counts by example, of both policies. Source: the cluster-robust variance of a
    difference of ratios (Liang and Zeger 1986), with m / (m - 1) for m examples.
    """
    deviations = defaultdict[Any, float](float)
    for sign, own, replies in zip((-1, 1), held, num_replies, strict=True):
        share = own.total() / replies.total()
        for example, count in replies.items():
            deviations[example] += sign * (own[example] - share * count) / replies.total()
    num_examples = len(deviations)
    variance = math.fsum(value * value for value in deviations.values())
    return math.sqrt(variance * num_examples / max(1, num_examples - 1))


def _phrase_lines(scored: Sequence[tuple[float, str, Counts]], sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the first phrases, without those that stand within an earlier one, or around it."""
    lines: list[dict[str, Any]] = []
    for _, phrase, held in scored:
        if any(phrase in line["phrase"] or line["phrase"] in phrase for line in lines):
            continue
        line: dict[str, Any] = {"phrase": phrase, "condition": f"reply ~* {any_case(phrase)}"}
        for name, own, size in zip(("a", "b"), held, sizes, strict=True):
            line |= {name: own.total(), f"share_{name}": own.total() / size, f"examples_{name}": len(own)}
        lines.append(line)
        if len(lines) == MOST_PHRASES:
            break
    return lines

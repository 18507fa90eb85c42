"""What changed in a run's replies between two of its policies: phrases gained and lost, length, repetition, format.

Each line has a condition (`flows.queries.conditions`) that finds its rollouts in the whole run.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from flows.queries.conditions import sql_text
from flows.queries.request import NotThere
from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader

COLUMNS = ("step", "key", "trace_id", "for_training", "policy_version", "reward", "length", "is_truncated", "reply")
MOST_REPLIES, MOST_CHARACTERS = 1000, 8000
"""Replies of a policy that are looked at for phrases, the first ones, and characters of each."""
LONGEST_PHRASE, MOST_PHRASES = 5, 15
"""Words of a phrase, and phrases of each kind that are returned."""
SURE = 3.0
"""Standard errors by which two shares have to differ: a smaller difference may be chance."""
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


def policy_versions(library: StoreReader, run: str) -> list[int]:
    """Return the versions of the policies that sampled a run's rollouts for training. Raises NotThere."""
    rows = run_rollouts(library, run, ("for_training", "policy_version"))
    return sorted(rows.filter("for_training")["policy_version"].unique().to_list())


def policy_changes(library: StoreReader, run: str, a: int, b: int) -> dict[str, Any]:
    """Return what changed from policy `a` to policy `b` of a run, in rollouts for training.

    `counts`: rollouts of each; `measures`: name, a, b, is_share and condition; `gained` and `lost`: phrase, how many
    replies of a and of b hold it, their shares, and condition, what differs most first. Raises NotThere for a version
    that sampled nothing.
    """
    named = run_rollouts(library, run, ("key", "for_training", "policy_version"))
    keys = named.filter(pl.col("for_training") & pl.col("policy_version").is_in([a, b]))["key"]
    rows = run_rollouts(library, run, COLUMNS, set(keys)) if len(keys) else named.clear()
    own = [rows.filter(pl.col("for_training") & (pl.col("policy_version") == version)) for version in (a, b)]
    for version, each in zip((a, b), own, strict=True):
        if each.is_empty():
            known = ", ".join(map(str, policy_versions(library, run)[:50]))
            raise NotThere(f"policy {version} sampled no rollout of run {run!r}; there are {known}")
    first, second = (_replies(each) for each in own)
    gained, lost = _phrases(first, second)
    counts = [each.height for each in own]
    return {"counts": counts, "measures": _measures(own[0], own[1], b), "gained": gained, "lost": lost}


def _replies(rows: pl.DataFrame) -> list[str]:
    replies = rows["reply"].drop_nulls().head(MOST_REPLIES).str.head(MOST_CHARACTERS)
    return [each.lower() for each in replies.to_list()]


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


def _repetition(replies: Sequence[str]) -> float | None:
    """Return the share of phrases of three words that a reply had before, averaged over replies with any."""
    shares = []
    for text in replies:
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


def _held_phrases(replies: Sequence[str]) -> Counter[str]:
    """Return in how many replies each phrase is; phrases on one line, as they are written."""
    found: Counter[str] = Counter()
    for text in replies:
        phrases = {text[begin:end] for begin, end in _spans(text, 1, LONGEST_PHRASE)}
        found.update(each for each in phrases if "\n" not in each and not _AT_ENDS.search(each))
    return found


def _phrases(first: Sequence[str], second: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the phrases whose share of replies grew, and those whose share fell, the surest first."""
    counts, sizes = (_held_phrases(first), _held_phrases(second)), (len(first), len(second))
    scored = []
    for phrase in counts[0].keys() | counts[1].keys():
        held = counts[0][phrase], counts[1][phrase]
        score = _standard_errors(held, sizes)
        if abs(score) >= SURE:
            scored.append((score, phrase, held))
    # Of those that are equally sure the longest comes first: it says more.
    scored.sort(key=lambda each: (-abs(each[0]), -len(each[1]), each[1]))
    grown, fallen = ([each for each in scored if (each[0] > 0) == grew] for grew in (True, False))
    return _phrase_lines(grown, sizes), _phrase_lines(fallen, sizes)


def _standard_errors(held: tuple[int, int], sizes: tuple[int, int]) -> float:
    """Return by how many standard errors the second share is above the first, as if both were one."""
    if not all(sizes):
        return 0.0
    shares = held[0] / sizes[0], held[1] / sizes[1]
    both = (sum(held) + 1) / (sum(sizes) + 2)
    return (shares[1] - shares[0]) / math.sqrt(both * (1 - both) * (1 / sizes[0] + 1 / sizes[1]))


def _phrase_lines(scored: Sequence[tuple[float, str, tuple[int, int]]], sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the first phrases, without those that stand within an earlier one, or around it."""
    found: list[dict[str, Any]] = []
    for _, phrase, held in scored:
        if any(phrase in each["phrase"] or each["phrase"] in phrase for each in found):
            continue
        found.append(
            {
                "phrase": phrase,
                "a": held[0],
                "b": held[1],
                "share_a": held[0] / sizes[0],
                "share_b": held[1] / sizes[1],
                "condition": f"contains(lower(reply), {sql_text(phrase)})",
            }
        )
        if len(found) == MOST_PHRASES:
            break
    return found

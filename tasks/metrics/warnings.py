"""Warnings: rules over the figures and the replies of a run's last steps, for what a mean reward does not show.

A rule looks at the last steps alone, so it says the same in a run and in a resumed one. The recorded runs on which
the rules were tried are in docs/warnings.md.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.runtime.stored_rows import StoredRows

LAST, BEFORE, MIN_BEFORE = 2, 10, 4
"""Steps that must all be unusual, those before them that say what is usual, and the fewest of these."""
WINDOW = LAST + BEFORE + 1
"""Steps that the rules over figures look at; the first is for the question whether the warning is new."""


class Rule(NamedTuple):
    """A figure that moves by `threshold`, or to `threshold` times what it was (grows, shrinks), out of its range."""

    name: str
    figure: str
    """Its full name; figures/... are those of `Replies.figures`."""
    move: str
    """rises, falls, grows, shrinks"""
    threshold: float
    why: str
    where: str = ""
    """A condition that finds rollouts which show it; empty where none does."""


_LENGTH, _ENTROPY = "num_output_tokens/all", "updates/entropy/mean"
RULES = (
    Rule("length_grows", _LENGTH, "grows", 2.0, "a reward that pays for words"),
    Rule("length_shrinks", _LENGTH, "shrinks", 0.4, "thinking that is given up"),
    Rule("truncation", "is_truncated/all", "rises", 0.2, "replies that do not end", "is_truncated"),
    Rule("repetition", "figures/repetition", "rises", 0.2, "loops"),
    Rule("identical_replies", "figures/identical_replies", "rises", 0.3, "one answer to everything"),
    Rule("entropy_falls", _ENTROPY, "shrinks", 0.25, "a policy that no longer tries anything"),
    Rule("entropy_grows", _ENTROPY, "grows", 2.0, "a policy that falls apart"),
    Rule("errors", "errored_rollout/all", "rises", 0.1, "a sandbox or a judge that fails", "error_class is not null"),
    Rule("reward_falls", "reward/all/mean", "shrinks", 0.5, "a policy that forgets"),
    Rule("mismatch", "updates/mismatch_kl/mean", "rises", 0.02, "engine and learner that part"),
    Rule("gradient", "updates/grad_norm/mean", "grows", 5.0, "steps that destroy the policy"),
)
REWARD_PART, DISAGREE, PHRASE = "reward_part", "judges_disagree", "phrase"
NAMES = (*(rule.name for rule in RULES), REWARD_PART, DISAGREE, PHRASE)
"""The names of all rules."""
PART_RISE, PART_FALL = 0.1, 0.05
"""What a named reward gains, and another loses, out of their ranges, where one takes over."""
AGREEMENT_FALL = 0.4
"""What the rank correlation of a judge and another named reward loses where they no longer agree."""
_PART = re.compile(r"rewards/all/.+/mean")
_PAIR, _JUDGED = re.compile(r"agreement/all/(.+)"), re.compile(r"judge/(.+)/rollouts")


class Hit(NamedTuple):
    """A rule that holds at a step, and did not at the one before."""

    rule: str
    step: int
    text: str
    where: str = ""
    """A condition on rollouts that finds those which show it; empty where none does."""


def figure_hits(steps: Sequence[Mapping[str, Any]]) -> list[Hit]:
    """Return the rules over figures that begin to hold at the last of some steps, of which WINDOW are enough.

    Each has `step` and `metrics`, values by full name; a missing value is not zero.
    """
    held = {hit.rule for hit in held_rules(steps[:-1])}
    return [hit for hit in held_rules(steps) if hit.rule not in held]


def held_rules(steps: Sequence[Mapping[str, Any]]) -> list[Hit]:
    """Return the rules over figures that hold at the last of some steps, given as to `figure_hits`."""
    recent = steps[-WINDOW:]
    if not recent:
        return []
    step, found = recent[-1]["step"], []
    for rule in RULES:
        if change := _change(recent, rule.figure, rule.move, rule.threshold):
            found.append(Hit(rule.name, step, f"{change}: {rule.why}", rule.where))
    parts = [name for name in recent[-1]["metrics"] if _PART.fullmatch(name)]
    risen = [change for name in parts if (change := _change(recent, name, "rises", PART_RISE))]
    fallen = [change for name in parts if (change := _change(recent, name, "falls", PART_FALL))]
    if fallen:
        found += [Hit(REWARD_PART, step, f"{change}, while {fallen[0]}") for change in risen]
    pairs = judged_pairs(recent[-1]["metrics"])
    apart = [change for name in pairs if (change := _change(recent, name, "falls", AGREEMENT_FALL))]
    return found + [Hit(DISAGREE, step, f"{change}: a judge that is fooled, or a rule that is") for change in apart]


def judged_pairs(metrics: Iterable[str]) -> list[str]:
    """Return the names of the agreements of which one side is a judge."""
    judges = {found[1] for name in metrics if (found := _JUDGED.fullmatch(name))}
    return [name for name in metrics if (found := _PAIR.fullmatch(name)) and judges & {*found[1].split("/")}]


def _change(steps: Sequence[Mapping[str, Any]], figure: str, move: str, threshold: float) -> str:
    """Return how a figure moved out of the range of the steps before; empty where it did not by the threshold."""
    known = [value for step in steps if (value := step["metrics"].get(figure)) is not None]
    now, before = known[-LAST:], known[-LAST - BEFORE : -LAST]
    if len(before) < MIN_BEFORE or steps[-1]["metrics"].get(figure) is None:
        return ""
    usual, up = median(before), move in ("rises", "grows")
    bound = {"rises": usual + threshold, "falls": usual - threshold}.get(move, usual * threshold)
    is_out = min(now) > max(before) and min(now) >= bound if up else max(now) < min(before) and max(now) <= bound
    # Of a figure below zero no multiple is usual.
    if not is_out or (usual <= 0 and move in ("grows", "shrinks")):
        return ""
    return f"{figure} {'rose' if up else 'fell'} from {usual:.3g} to {now[-1]:.3g}"


MAX_REPLIES, MAX_CHARACTERS, MAX_TEXT = 1000, 4000, 500_000
"""Replies of a step that are read, characters of each, and of all: phrases take memory."""
MAX_WORDS, MIN_EXAMPLES, MIN_SIGMAS = 5, 3, 2.0
"""Words of a phrase, examples that it is in, as replies to one example share its words, and standard errors by which
its replies have more reward than the others: less may be chance."""
OFTEN, SELDOM = 0.25, 0.02
"""Least share of a step's replies with a phrase that is new, and most that had it in each step of the past. Half as
many of the last step's have it: the words of an example are there once."""
PAST, MIN_PAST = range(4, 9), 3
"""How many steps ago the past is: a phrase may spread for so long before it is often; and fewest of these steps."""
# A tag is one word, so that `<answer></answer>` is a phrase of two.
_WORDS = re.compile(r"</?[A-Za-z][^<>\s]{0,40}>|\w+(?:['\u2019]\w+)*|[^\w\s]")
_AT_ENDS = re.compile(r"^[^\w\s<]+\s*[\w<]|[\w>]\s*[^\w\s>]+$")
"""Marks at the ends of a phrase of words: they come with every sentence."""


def phrases_of(text: str) -> list[str]:
    """Return the phrases of a reply, those on one line, as they are written."""
    words = [match.span() for match in _WORDS.finditer(text)]
    spans = (zip(words, words[length:], strict=False) for length in range(MAX_WORDS))
    phrases = {text[first[0] : last[1]] for pairs in spans for first, last in pairs}
    return [phrase for phrase in phrases if "\n" not in phrase and not _AT_ENDS.search(phrase)]


@dataclass(frozen=True)
class Replies:
    """What the replies of a step say: for each the example, the reward (None: not scored) and the text."""

    examples: Sequence[tuple[str, str]]
    rewards: Sequence[float | None]
    written: Sequence[str]
    phrases: Mapping[str, Sequence[int]]
    """The places of the replies that have a phrase; phrases that SELDOM of them have are left out."""

    @classmethod
    def read(cls, traces: pa.Table, messages: StoredRows) -> "Replies":
        """Read the policy's replies; `messages` has the rows of its traces."""
        rows = traces.filter(pc.field("trainable")).slice(0, MAX_REPLIES).to_pylist()
        said = {row["trace_id"]: "" for row in rows}
        for part in messages.parts(["trace_id", "sampled", "content"]):
            own = part.filter(pc.field("sampled"))
            for trace, content in zip(texts(own["trace_id"]), own["content"].to_pylist(), strict=True):
                if trace in said and content:
                    said[trace] = f"{said[trace]}{content}\n"[: min(MAX_CHARACTERS, MAX_TEXT // len(said))]
        places = defaultdict[str, list[int]](list)
        for place, text in enumerate(said.values()):
            for phrase in phrases_of(text.lower()):
                places[phrase].append(place)
        often = {phrase: held for phrase, held in places.items() if len(held) > SELDOM * len(said)}
        examples = [(row["environment"], row["example_id"]) for row in rows]
        return cls(examples, [row["reward"] for row in rows], [*said.values()], often)

    def figures(self) -> dict[str, float]:
        """Return the share of replies that another example has as well, and the mean share of repeated words."""
        if not self.written:
            return {}
        examples = defaultdict[str, set[tuple[str, str]]](set)
        for text, example in zip(self.written, self.examples, strict=True):
            examples[text].add(example)
        return {
            "figures/identical_replies": fmean(len(examples[text]) >= MIN_EXAMPLES for text in self.written),
            "figures/repetition": fmean(map(_repetition, self.written)),
        }


TRACE_COLUMNS = ["trace_id", "environment", "example_id", "trainable", "reward"]
"""What `Replies` reads of traces."""


def _repetition(text: str) -> float:
    """Return the share of pairs of words that stood in the text before."""
    pairs = [*pairwise(_WORDS.findall(text))]
    return 1 - len({*pairs}) / len(pairs) if pairs else 0.0


def phrase_hits(step: int, past: Sequence[Replies], last: Replies, now: Replies) -> list[Hit]:
    """Return the most frequent phrase that is new since the `past` steps and paid; none where these are few.

    It is in OFTEN of the replies `now`, in half as many of the `last` step, and in half of the examples, which are
    MIN_EXAMPLES or more. Its replies have a higher mean reward than the others, by MIN_SIGMAS standard errors.
    """
    found = list[tuple[int, int, str, str]]()
    for phrase, held in now.phrases.items() if len(past) >= MIN_PAST else ():
        num_examples, share = len({now.examples[place] for place in held}), len(held) / len(now.written)
        often = share >= OFTEN and len(last.phrases.get(phrase, ())) >= OFTEN / 2 * len(last.written)
        many = num_examples >= max(MIN_EXAMPLES, len({*now.examples}) / 2)
        if often and many and not any(phrase in replies.phrases for replies in past) and (gain := _gain(now, held)):
            text = f"{phrase!r} is in {share:.0%} of replies ({num_examples} examples), new; their reward is {gain}"
            found.append((len(held), len(phrase), phrase.replace("'", "''"), text))
    most = sorted(found)[-1:]
    return [Hit(PHRASE, step, text, f"contains(lower(reply), '{quoted}')") for *_, quoted, text in most]


def _gain(replies: Replies, held: Sequence[int]) -> str:
    """Return the mean rewards of replies with a phrase and of the others; empty where the first is not surely more."""
    sides = held, {*range(len(replies.written))} - {*held}
    scored = [[reward for place in side if (reward := replies.rewards[place]) is not None] for side in sides]
    if not all(scored):
        return ""
    error = pstdev([*scored[0], *scored[1]]) * math.sqrt(sum(1 / len(rewards) for rewards in scored))
    more, less = map(fmean, scored)
    return f"{more:.3g}, of others {less:.3g}" if more - less > MIN_SIGMAS * error else ""

"""Compares rollouts of two runs: those of a step, attempts at one example, two of these by words or tokens."""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import takewhile, zip_longest
from operator import eq
from typing import Any

import polars as pl

from flows.queries.compare import step_pair
from flows.queries.compare_rows import StepRows, num_kept, shared_advantages, table_columns, trace_verdicts
from flows.queries.messages import Images, branches, read_message
from flows.queries.request import NotThere
from flows.queries.rollouts import index_of_example, nearest_examples
from flows.queries.step import natural
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import PLACE, tokens
from flows.queries.trace import FoundTrace
from flows.reporting.formats import cut
from tasks.arrays.message_graph import BrokenGraph

OF_TRACE = ("trace_id", "key", "group_id", "environment", "example_id", "agent")
OF_SIDE = ("reward", "outcome", "advantage", "num_output_tokens", "error_class")
BOTH, A_ALONE, B_ALONE = "both", "a", "b"


def compared_traces(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each rollout of either run at a step, those of both once; in the order of a, then of b.

    Columns: trace_id; `side` (both, a or b); environment, example_id, agent; `group`, a number for the rollouts that
    are compared with each other, those of paired groups by the same agent; key_a and key_b, the work that made the
    trace, as each run uses it; group_a and group_b; and for each run, ending in _a and _b: reward, outcome (`kept`, or
    the filter's reason; null where nothing was judged), advantage, num_output_tokens, error_class.
    Traces are the same where their ids are. Raises NotThere.
    """
    one, other = map(_step_traces, step_pair(library, a, b, step))
    joined = one.rename({name: f"{name}_a" for name in OF_SIDE}).join(
        other.rename({name: f"{name}_b" for name in OF_SIDE}), on="trace_id", how="full", suffix="_b", coalesce=False
    )
    one_alone = pl.when(pl.col("trace_id_b").is_null()).then(pl.lit(A_ALONE))
    side = one_alone.when(pl.col("trace_id").is_null()).then(pl.lit(B_ALONE)).otherwise(pl.lit(BOTH)).alias("side")
    shared = ("trace_id", "environment", "example_id", "agent", "group")
    found = joined.sort("place", "place_b", nulls_last=True, maintain_order=True).select(
        *(pl.coalesce(name, f"{name}_b") for name in shared[:1]),
        side,
        *(pl.coalesce(name, f"{name}_b") for name in shared[1:]),
        pl.col("key").alias("key_a"),
        "key_b",
        pl.col("group_id").alias("group_a"),
        pl.col("group_id_b").alias("group_b"),
        *(f"{name}_a" for name in OF_SIDE),
        *(f"{name}_b" for name in OF_SIDE),
    )
    return found.with_columns(_number_groups(found))


def compared_groups(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each group of rollouts of either run at a step, and each agent in it, by group_a.

    Groups at the same example are paired; where it has several in a step, the first with the first.
    Columns: group (as in `compared_traces`), group_a, group_b, environment, example_id, agent; num_shared (rollouts in
    both); for each run num_X, reward_X (mean, null where none was scored), kept_X (null where nothing was judged);
    difference (reward_b - reward_a); max_advantage_difference, over the samples of both, null where there are none.
    Raises NotThere.
    """
    rows = compared_traces(library, a, b, step)
    samples = compared_samples(library, a, b, step).join(rows.select("trace_id", "group"), on="trace_id")
    moved = samples.group_by("group").agg(max_advantage_difference=pl.col("difference").abs().max())
    facts = ("group_a", "group_b", "environment", "example_id", "agent")
    found = rows.group_by("group", maintain_order=True).agg(
        *(pl.col(name).drop_nulls().first() for name in facts),
        num_shared=(pl.col("side") == BOTH).sum().cast(pl.Int64),
        **_of_side("a"),
        **_of_side("b"),
    )
    found = found.with_columns(difference=pl.col("reward_b") - pl.col("reward_a"))
    return found.join(moved, on="group", how="left").sort("group")


def compared_samples(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each training sample of both runs at a step, in order of ids.

    Columns: sample_id, trace_id, group_id, `a` and `b` (its advantages), difference (b - a). Raises NotThere.
    """
    rows = shared_advantages(*step_pair(library, a, b, step)).sort("sample_id")
    return rows.select("sample_id", _trace_id(), "group_id", "a", "b", "difference")


def _trace_id() -> pl.Expr:
    """Return the trace that a sample is a branch of."""
    return pl.col("sample_id").str.replace(r"/[^/]*$", "").alias("trace_id")


def _step_traces(rows: StepRows) -> pl.DataFrame:
    """Return the rollouts of a step with their verdicts and advantages, in the order in which they were made."""
    found = table_columns(rows.traces, *OF_TRACE, "reward", "num_output_tokens", "error_class")
    credits = table_columns(rows.samples, "sample_id", "advantage")
    advantages = credits.group_by(_trace_id()).agg(pl.col("advantage").drop_nulls().first())
    found = found.unique("trace_id", keep="last", maintain_order=True).with_row_index("place")
    for of_traces in (trace_verdicts(rows), advantages):
        found = found.join(of_traces, on="trace_id", how="left", maintain_order="left")
    return found.select("place", *OF_TRACE, _group(), *OF_SIDE)


def _group() -> pl.Expr:
    """Return what names a group in both runs: its example, which of the example's groups it is, and the agent."""
    # Runs that sampled apart have groups of other ids at the same example: the first is held against the first.
    number = pl.col("group_id").rank("dense").over("environment", "example_id")
    return pl.concat_str("environment", "example_id", number, "agent", separator="\0").alias("group")


def _number_groups(rows: pl.DataFrame) -> pl.Series:
    """Return the groups as numbers in the order of a's ids; those that b alone has come last."""
    named = rows.group_by("group").agg(pl.col("group_a").drop_nulls().first(), pl.col("group_b", "agent").first())
    order = sorted(
        named.iter_rows(),
        key=lambda row: (row[1] is None, natural(row[1] or row[2] or ""), row[3], row[0]),
    )
    numbers = {row[0]: number for number, row in enumerate(order)}
    return pl.Series("group", [numbers[name] for name in rows["group"]], dtype=pl.Int64)


def _of_side(side: str) -> dict[str, pl.Expr]:
    mine = pl.col("side").is_in([BOTH, side])
    outcome = pl.col(f"outcome_{side}").filter(mine)
    return {
        f"num_{side}": mine.sum().cast(pl.Int64),
        f"reward_{side}": pl.col(f"reward_{side}").mean(),
        f"kept_{side}": num_kept(outcome),
    }


ATTEMPTS = {
    "side": pl.String,
    "run": pl.String,
    "step": pl.Int64,
    "for_training": pl.Boolean,
    "trace_id": pl.String,
    "key": pl.String,
    "agent": pl.String,
    "reward": pl.Float64,
    "error_class": pl.String,
    "policy_version": pl.Int64,
    "in_both": pl.Boolean,
}
"""One attempt as one of the runs uses it; `step` of an evaluation is the version that it scored. `in_both`: the other
side has the same rollout."""


def compared_attempts(library: StoreReader, a: str, b: str, environment: str, example_id: str) -> pl.DataFrame:
    """Return one row for each attempt of either run at an example, a's first, by step; columns as in `ATTEMPTS`.

    Both runs may be the same one. Raises NotThere, with the nearest examples, where neither tried it.
    """
    sides = [_attempts(library, side, run, environment, example_id) for side, run in (("a", a), ("b", b))]
    found = pl.concat(sides)
    if found.is_empty():
        near = nearest_examples(library, (a, b), environment, example_id)
        hint = f"; the nearest examples are {', '.join(near)}" if near else ""
        raise NotThere(f"neither {a!r} nor {b!r} tried the example {example_id!r} of {environment!r}{hint}")
    shared = set(sides[0]["trace_id"]) & set(sides[1]["trace_id"])
    return found.with_columns(in_both=pl.col("trace_id").is_in(list(shared))).select(*ATTEMPTS)


def moments(attempts: pl.DataFrame) -> pl.DataFrame:
    """Return when each side tried the example: side, step, for_training, num_attempts, reward (mean), in order."""
    when = ("side", "step", "for_training")
    mean = pl.col("reward").mean()
    return attempts.group_by(when, maintain_order=True).agg(num_attempts=pl.len().cast(pl.Int64), reward=mean)


def typical(attempts: pl.DataFrame) -> Mapping[str, Any] | None:
    """Return the attempt whose reward is nearest to the mean, the first of several; None where there is none."""
    if attempts.is_empty():
        return None
    apart = (pl.col("reward") - pl.col("reward").mean()).abs()
    return attempts.sort(apart, nulls_last=True, maintain_order=True).row(0, named=True)


def _attempts(library: StoreReader, side: str, run: str, environment: str, example_id: str) -> pl.DataFrame:
    rows = index_of_example(library, run, environment, example_id)
    rows = rows.with_columns(side=pl.lit(side), run=pl.lit(run))
    return rows.select(pl.col(name).cast(kind) for name, kind in ATTEMPTS.items() if name != "in_both")


MOST_TURNS = 30
"""Turns that are laid side by side."""
Turn = tuple[list[dict[str, str]], str | None]
"""What came before a sampled message (role and text), and its text; None where nothing was sampled after it."""


def turns(rows: pl.DataFrame) -> list[Turn]:
    """Return the turns of a trace along its last way from a root to a leaf; `rows` are its `messages`."""
    try:
        ways = branches(rows)
    except BrokenGraph:  # then the messages stand as they are numbered
        ways = []
    way = rows.filter(pl.col("message").is_in(ways[-1])).sort("message") if ways else rows
    given: list[dict[str, str]] = []
    done: list[Turn] = []
    for row in way.iter_rows(named=True):
        if row["sampled"]:
            done.append((given, _text(row)))
            given = []
        else:
            given.append({"role": row["role"], "text": _text(row)})
    return [*done, (given, None)] if given else done


def side_by_side(one: Sequence[Turn], other: Sequence[Turn]) -> dict[str, Any]:
    """Return the turns of two attempts, pair by pair, what was said as pieces of words; see `compared_words`.

    `turns` have `same_given`, `given_a`, `given_b`, `said_a` and `said_b`, None where an attempt has no such turn;
    `num_turns` are all, of which at most MOST_TURNS are here.
    """
    pairs = list(zip_longest(one, other))
    return {"turns": [_pair_of_turns(*each) for each in pairs[:MOST_TURNS]], "num_turns": len(pairs)}


def _pair_of_turns(one: Turn | None, other: Turn | None) -> dict[str, Any]:
    texts = [None if turn is None else turn[1] for turn in (one, other)]
    said: list[Any] = list(compared_words(texts[0] or "", texts[1] or ""))
    given = [None if turn is None else turn[0] for turn in (one, other)]
    return {
        "same_given": given[0] == given[1],
        **{f"given_{side}": _messages_to_show(own) for side, own in zip("ab", given, strict=True)},
        **{
            f"said_{side}": None if text is None else {"pieces": pieces, "left_out": shown_of(text)["left_out"]}
            for side, text, pieces in zip("ab", texts, said, strict=True)
        },
    }


def _messages_to_show(own: Sequence[dict[str, str]] | None) -> list[dict[str, Any]] | None:
    return None if own is None else [{"role": each["role"], **shown_of(each["text"])} for each in own]


def _text(row: dict[str, Any]) -> str:
    """Return all that a message says as one text: thoughts, parts, calls of tools; an image by its name alone."""
    read = read_message(row, Images(()))
    said = [f"(thoughts)\n{read['thoughts']['text']}"] if read["thoughts"] else []
    said += ["(image)" if each["kind"] == "image" else each["text"]["text"] for each in read["parts"]]
    said += [f"(call) {each['name'] or ''} {each['arguments']['text']}" for each in read["calls"]]
    return "\n".join(said)


LONGEST = 20_000
"""Characters of a text that are compared and shown."""
MOST_WORDS = 1_200
"""Words in the middle, between what both begin and end with, that are compared: the time grows with their square."""
SAME, OWN, APART = "same", "own", "apart"
"""In both texts, in this one alone, and too much to be compared."""
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
Piece = dict[str, str]


def compared_words(a: str, b: str) -> tuple[list[Piece], list[Piece]]:
    """Return both texts as pieces in order, each `text` and `kind`: same, own, or apart, which nobody compared.

    The pieces of a text are the text again, as far as it is shown: its first LONGEST characters.
    """
    one, other = (_WORDS.findall(cut(each, LONGEST)[0]) for each in (a, b))
    # Equal ends are cut off first: the time of what is left grows with its square.
    head = sum(1 for _ in takewhile(bool, map(eq, one, other)))
    tail = sum(1 for _ in takewhile(bool, map(eq, reversed(one[head:]), reversed(other[head:]))))
    middle = [words[head : len(words) - tail] for words in (one, other)]
    found = _pieces(*middle)
    ends = [(one[:head], one[len(one) - tail :]), (other[:head], other[len(other) - tail :])]
    first, second = (
        _join_pieces([(SAME, begin), *pieces, (SAME, end)]) for (begin, end), pieces in zip(ends, found, strict=True)
    )
    return first, second


def shown_of(text: str) -> dict[str, Any]:
    """Return what of a text is shown, and how many characters are left out."""
    head, left_out = cut(text, LONGEST)
    return {"text": head, "left_out": left_out}


def _pieces(one: list[str], other: list[str]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    near = one[:MOST_WORDS], other[:MOST_WORDS]
    found: tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]] = ([], [])
    for kind, a1, a2, b1, b2 in SequenceMatcher(None, near[0], near[1]).get_opcodes():
        how = SAME if kind == "equal" else OWN
        found[0].append((how, near[0][a1:a2]))
        found[1].append((how, near[1][b1:b2]))
    for pieces, words in zip(found, (one, other), strict=True):
        pieces.append((APART, words[MOST_WORDS:]))
    return found


def _join_pieces(pieces: list[tuple[str, list[str]]]) -> list[Piece]:
    """Return pieces as texts; empty ones are left out, neighbours of one kind are one."""
    joined: list[Piece] = []
    for kind, words in pieces:
        if words and joined and joined[-1]["kind"] == kind:
            joined[-1]["text"] += "".join(words)
        elif words:
            joined.append({"kind": kind, "text": "".join(words)})
    return joined


TOKEN_MEASURES = ("advantage", "rl_weight", "ce_weight", "ref_kl_weight", "signal", "trained_rl_weight")
"""What can differ between runs that share a rollout, as in `flows.queries.tokens.TOKENS`."""


def compared_tokens(library: StoreReader, one: FoundTrace, other: FoundTrace) -> pl.DataFrame:
    """Return one row for each token that was sampled, of the same rollout in two runs.

    Columns: message, place, token_id, text, and each measure as `NAME_a`, `NAME_b` and `NAME_difference` (b - a; null
    where either has none).
    """
    rows = tokens(library, one).filter("sampled").select(*PLACE, "token_id", "text", *TOKEN_MEASURES)
    beside = tokens(library, other).select(*PLACE, *(pl.col(name).alias(f"{name}_b") for name in TOKEN_MEASURES))
    joined = rows.join(beside, on=PLACE, how="left", maintain_order="left")
    named = [
        each.cast(pl.Float64).alias(f"{name}_{side}")
        for name in TOKEN_MEASURES
        for side, each in (
            ("a", pl.col(name)),
            ("b", pl.col(f"{name}_b")),
            ("difference", pl.col(f"{name}_b") - pl.col(name)),
        )
    ]
    return joined.select(*PLACE, "token_id", "text", *named)


def changed_measures(rows: pl.DataFrame) -> dict[str, int]:
    """Return how many tokens differ, by measure; those of which one run has a value and the other none too."""
    return {name: int(rows.select(_differs(name).sum()).item() or 0) for name in TOKEN_MEASURES}


def _differs(name: str) -> pl.Expr:
    return ~pl.col(f"{name}_a").eq_missing(pl.col(f"{name}_b"))

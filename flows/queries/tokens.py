"""Tokens of a trace with their texts and measurements, and as a page shows them: which are drawn, in which colours."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from flows.queries.messages import message_works
from flows.queries.request import plain
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import select_of_trace
from storage.read.views import all_views
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, TokenTexts, tokenizer_of

WEIGHTS = {"rl_weights": "rl_weight", "ce_weights": "ce_weight", "ref_kl_weights": "ref_kl_weight"}
TRAINED_WEIGHTS = {name: f"trained_{name}" for name in WEIGHTS.values()}
"""What a token weighs by the credit, and what it was trained with."""
_TOKENS = "select * exclude (run, key, trace_id) from trace_tokens where trace_id = $id"


def tokens(
    reader: StoreReader, trace: FoundTrace, within: Collection[int] | None = None, texts: bool = True
) -> pl.DataFrame:
    """Return the tokens of a trace by message and place; only those of the messages `within`, where it is given.

    Columns: those of view `trace_tokens`, and `text` and `special` as `with_texts` adds them, unless `texts` is false.
    A token that several branches share is returned once, with the weights that the first one's sample gives it.
    """
    rows = select_of_trace(reader.frames(), trace.lineage, trace.trace_id, _TOKENS)
    rows = rows.with_columns(pl.col("ratio", "mismatch").fill_nan(None))
    if within is not None:
        rows = rows.filter(pl.col("message").is_in(list(within)))
    return with_texts(reader, trace, rows) if texts else rows


def with_texts(reader: StoreReader, trace: FoundTrace, tokens: pl.DataFrame) -> pl.DataFrame:
    """Return tokens, which have the columns message and token_id, with `text` and `special`.

    A token that completes no character has its id as text, as TokenText has it. Both columns are null where there is no
    tokenizer.
    """
    names, (texts, _) = ("message", "place", "token_id", "text", "special"), tokenizer(reader, trace)
    if texts is None:
        rows = tokens.with_columns(text=pl.lit(None, pl.String), special=pl.lit(None, pl.Boolean))
    else:
        parts = tokens.partition_by("message", maintain_order=True) if len(tokens) else []
        pieces = [piece for part in parts for piece in texts.of(part["token_id"].to_list())]
        rows = tokens.with_columns(
            pl.Series("text", [piece.text for piece in pieces], pl.String),
            pl.Series("special", [piece.special for piece in pieces], pl.Boolean),
        )
    return rows.select(*names, pl.exclude(names))


def tokenizer(reader: StoreReader, trace: FoundTrace) -> tuple[TokenTexts | None, str]:
    """Return the tokenizer of a trace; where there is none, None and why: token ids can be looked at all the same."""
    policy = str(trace.row["policy_key"])
    if not policy and trace.row["trainable"]:  # a text that no policy sampled: what is trained on is of the run
        policy = next(_policies(reader, trace), "")
    try:
        texts = tokenizer_of(reader.store, reader.config(trace.run), policy, _policies(reader, trace))
    except TokenizerUnreadable as error:
        return None, str(error)
    return texts, "" if texts else "no tokenizer of the policy that sampled it is at hand"


def _policies(reader: StoreReader, trace: FoundTrace) -> Iterator[str]:
    """Yield the policies of the run, the newest first: their tokenizer is the same."""
    works = reader.frames(trace.run).graph.makers("policies")
    yield from (work.key for work in reversed(works))


def token_policies(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the runs of tokens by policy, in order; none of a trace that one policy sampled.

    Columns: message, start, num_tokens, policy_key, policy_version.
    """
    rows = reader.frames().rows(message_works(reader, trace), "token_policies")
    rows = rows.filter(trace_id=trace.trace_id).sort("message", "start")
    return rows.select("message", "start", "num_tokens", "policy_key", "policy_version").collect()


SIGNED, RISING, NONE = "abcdoefgh", "ABCDEFGH", "-"
"""Shades from far below zero to far above it, from little to much, and of what was not measured."""
STEPS = len(SIGNED) // 2
_TABLE = """
advantage         | advantage            | advantage         | ± 1e-10 0.1 0.5 1
rl_weight         | rl weight            | rl_weight         | ± 1e-10 0.1 0.5 1
ce_weight         | ce weight            | ce_weight         | ± 1e-10 0.1 0.5 1
ref_kl_weight     | ref_kl weight        | ref_kl_weight     | ± 1e-10 0.1 0.5 1
trained_rl_weight | rl weight as trained | trained_rl_weight | ± 1e-10 0.1 0.5 1
engine            | engine log-prob      | engine_logprob    | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
learner           | learner log-prob     | learner_logprob   | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
ratio             | importance ratio     | log_ratio         | ± 0.001 0.01 0.1 0.5
mismatch          | mismatch KL          | mismatch          | > 1e-8 1e-6 1e-5 1e-4 1e-3 1e-2 1e-1
entropy           | entropy              | entropy           | > 0.01 0.1 0.3 0.6 1 2 4
reference         | reference log-prob   | reference_logprob | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
signal            | reference signal     | signal            | ± 1e-10 0.1 0.5 1
outside           | trust region         | outside           | x:outside i:inside
policy            | versions older       | policy_age        | > 1 2 3 4 5 6 7
mask              | sampled or given     | sampled           | s:sampled u:given
content           | body or template     | is_content        | p:body t:template
trained           | trained              | trained           | y:trained n:not
"""
"""Name, label, column of view `trace_tokens` and scale of each colouring.

A scale has the sizes that divide its shades: of values around zero (±), from zero on (>), or of log-probs, whose sizes
are probabilities (p). Of a flag it has shade and label of yes and of no. A shade means the same in every trace.
"""


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens by a column."""

    name: str
    label: str
    column: str
    kind: str
    """±, >, p, or the shade and label of yes."""
    edges: tuple[str, ...]

    @cached_property
    def letters(self) -> str:
        """The shades, a letter each."""
        flags = f"{self.kind[0]}{self.edges[0][0]}" if ":" in self.kind else ""
        return flags or (SIGNED if self.kind == "±" else RISING)

    @property
    def description(self) -> str:
        """The meaning of the column that is named so, or else of the coloured one."""
        columns = all_views()["trace_tokens"].columns
        return columns.get(self.name, columns[self.column])

    def shades(self, tokens: pl.DataFrame) -> str:
        """Return a letter for each token."""
        if ":" in self.kind:
            letters = {True: self.letters[0], False: self.letters[1]}
            return "".join(letters.get(value, NONE) for value in tokens[self.column])
        values = tokens[self.column].cast(pl.Float64).to_numpy()
        edges = [-math.log(float(edge)) if self.kind == "p" else float(edge) for edge in self.edges]
        steps = np.searchsorted(edges, np.abs(np.nan_to_num(values)), "right")
        places = STEPS + np.where(values < 0, -steps, steps) if self.kind == "±" else steps
        return "".join(NONE if np.isnan(v) else self.letters[place] for v, place in zip(values, places, strict=True))

    def legend(self) -> list[tuple[str, str]]:
        """Return the letters with their meanings."""
        edges = self.edges
        if ":" in self.kind:
            labels = [self.kind[2:], edges[0][2:]]
        elif self.kind == "±":
            labels = [*(f"-{edge}" for edge in reversed(edges)), "0", *(f"+{edge}" for edge in edges)]
        else:
            first, sign = (">", "≤") if self.kind == "p" else ("<", "≥")
            labels = [f"{first} {edges[0]}", *(f"{sign} {edge}" for edge in edges)]
        return list(zip(self.letters, labels, strict=True))


def _colouring(line: str) -> Colouring:
    name, label, column, scale = (cell.strip() for cell in line.split("|"))
    kind, *edges = scale.split()
    return Colouring(name, label, column, kind, tuple(edges))


COLOURINGS = tuple(map(_colouring, _TABLE.strip().splitlines()))
NAMES = ("none", *(colouring.name for colouring in COLOURINGS))
SHARED = {"advantage": "rl_weight", "ce_weight": "ce_weight", "engine": "engine_logprob"}
"""The colouring where none is chosen: the first of these whose column has a value."""


def default_colouring(tokens: pl.DataFrame) -> str:
    """Return the colouring that says most of some tokens."""
    return next((name for name, column in SHARED.items() if (tokens[column].fill_null(0) != 0).any()), "mask")


DRAWN = 4000
"""Tokens that a page draws; of more, only how many there are."""
_BLANKS = re.compile("^ +| +$| {2,}")
Values = dict[str, Any]


def shown_tokens(
    reader: StoreReader, trace: FoundTrace, messages: Sequence[int], start: int = 0
) -> tuple[dict[int, Values], pl.DataFrame]:
    """Return the tokens of messages as values, by message, and the rows of those that are drawn.

    Of each message `num_tokens`, how many were `left_out`, `columns` (a list for each column of `tokens`), `drawn`
    (how each looks) and `shades` (a letter for each token, by colouring). `messages` are in order; `start` is the
    first token of the first one that is drawn.
    """
    rows = tokens(reader, trace, within=messages, texts=False).sort("message", "place")
    if start and messages:
        rows = rows.filter((pl.col("message") != messages[0]) | (pl.col("place") >= start))
    # Texts of those tokens alone that are drawn: a tokenizer is slower than all else here.
    drawn = with_texts(reader, trace, rows.head(DRAWN))
    values: dict[int, Values] = {}
    for message, count in rows.group_by("message", maintain_order=True).len().iter_rows():
        part = drawn.filter(message=message)
        values[message] = {
            "num_tokens": count,
            "left_out": count - part.height,
            "columns": {name: plain(part[name].to_list()) for name in part.columns if name != "message"},
            "drawn": [drawn_text(*token) for token in part.select("text", "token_id").iter_rows()],
            "shades": {one.name: one.shades(part) for one in COLOURINGS},
        }
    return values, drawn


def colourings(drawn: pl.DataFrame) -> list[Values]:
    """Return what tokens can be coloured by: name, label, `description`, number of measured tokens, legend."""
    return [
        {
            "name": colouring.name,
            "label": colouring.label,
            "description": colouring.description,
            "num_measured": len(drawn) - drawn[colouring.column].null_count(),
            "legend": [{"shade": shade, "label": label} for shade, label in colouring.legend()],
        }
        for colouring in COLOURINGS
    ]


def scaled_weights(drawn: pl.DataFrame) -> list[str]:
    """Return the weights, of `TRAINED_WEIGHTS`, with which some token was trained otherwise than its credit says."""
    return [name for name, trained in TRAINED_WEIGHTS.items() if bool((drawn[trained] != drawn[name]).any())]


def drawn_text(text: str | None, number: int) -> str:
    """Return a token as it is drawn: blanks at its ends and line ends by signs; its number where it has no text."""
    if text is None:
        return f"⟨{number}⟩"
    text = text.replace("\t", "⇥").replace("\n", "⏎\n")
    return _BLANKS.sub(lambda blanks: "·" * len(blanks[0]), text) or "∅"

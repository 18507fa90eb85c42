"""Every token of a trace with its text and all that the engine, the advantage stage and the learner said of it."""

from collections.abc import Collection, Iterator

import polars as pl

from flows.queries.messages import message_works
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import select_of_trace
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
    rows = select_of_trace(reader.frames(), trace.lineage, trace.trace_id, _TOKENS, id=trace.trace_id)
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

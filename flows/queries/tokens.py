"""Every token of a trace with its text and all that the engine, the advantage stage and the learner said of it."""

from collections.abc import Collection, Iterator

import polars as pl

from flows.queries.messages import message_works
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import select_of_trace
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, TokenTexts, tokenizer_of

TEXTS = {"text": pl.String, "special": pl.Boolean}


def with_texts(reader: StoreReader, trace: FoundTrace, tokens: pl.DataFrame) -> pl.DataFrame:
    """Return tokens, which have the columns message and token_id, with `text` and `special`.

    A token that completes no character has its id as text, as TokenText has it. Both columns are null where there is no
    tokenizer.
    """
    texts, _ = tokenizer(reader, trace)
    if texts is None:
        return tokens.with_columns(pl.lit(None, kind).alias(name) for name, kind in TEXTS.items())
    pieces = [
        piece
        for (_,), part in tokens.group_by("message", maintain_order=True)
        for piece in texts.of(part["token_id"].to_list())
    ]
    return tokens.with_columns(
        pl.Series("text", [piece.text for piece in pieces], pl.String),
        pl.Series("special", [piece.special for piece in pieces], pl.Boolean),
    )


def tokenizer(reader: StoreReader, trace: FoundTrace) -> tuple[TokenTexts | None, str]:
    """Return the tokenizer of a trace; where there is none, None and why: token ids can be looked at all the same."""
    policy = str(trace.row["policy_key"]) or _rendered_for(reader, trace)
    try:
        texts = tokenizer_of(reader.store, reader.config(trace.run), policy, _other_policies(reader, trace))
    except TokenizerUnreadable as error:
        return None, str(error)
    return texts, "" if texts else "no tokenizer of the policy that sampled it is at hand"


def _rendered_for(reader: StoreReader, trace: FoundTrace) -> str:
    """Return a policy whose tokenizer made the tokens of a text that none sampled: what is trained on is of the run."""
    return next(_other_policies(reader, trace), "") if trace.row["trainable"] else ""


def _other_policies(reader: StoreReader, trace: FoundTrace) -> Iterator[str]:
    """Yield the policies of the run, the newest first: their tokenizer is the same."""
    made = reader.frames(trace.run).graph.makers("policies")
    yield from (work.key for work in reversed(made))


WEIGHTS = {"rl_weights": "rl_weight", "ce_weights": "ce_weight", "ref_kl_weights": "ref_kl_weight"}
TRAINED_WEIGHTS = {name: f"trained_{name}" for name in WEIGHTS.values()}
"""What a token weighs by the credit, and what it was trained with."""
TOKENS = {
    "message": pl.Int32,
    "place": pl.Int64,
    "token_id": pl.Int32,
    **TEXTS,
    "sampled": pl.Boolean,
    "is_content": pl.Boolean,
    "policy_version": pl.Int64,
    "policy_age": pl.Int64,
    "branch": pl.Int32,
    "position": pl.Int64,
    "trained": pl.Boolean,
    "advantage": pl.Float32,
    "rl_weight": pl.Float32,
    "ce_weight": pl.Float32,
    "ref_kl_weight": pl.Float32,
    "trained_rl_weight": pl.Float32,
    "trained_ce_weight": pl.Float32,
    "trained_ref_kl_weight": pl.Float32,
    "engine_logprob": pl.Float32,
    "learner_logprob": pl.Float32,
    "log_ratio": pl.Float64,
    "ratio": pl.Float64,
    "mismatch": pl.Float64,
    "entropy": pl.Float32,
    "outside": pl.Boolean,
    "reference_logprob": pl.Float32,
    "signal": pl.Float32,
}
"""One row for each token of a trace's messages, by message and place; view `trace_tokens` says what the columns are.

`text` and `special` are what a token adds to the text, for people; null where its tokenizer is not at hand.
"""
_COLUMNS = ", ".join(name for name in TOKENS if name not in TEXTS)


def tokens(
    reader: StoreReader, trace: FoundTrace, within: Collection[int] | None = None, texts: bool = True
) -> pl.DataFrame:
    """Return the tokens of a trace, columns as in `TOKENS`; only those of the messages `within`, where it is given.

    Without `texts` their two columns are not there: `with_texts` finds those of the tokens that are looked at.
    A token that several branches share is returned once, with the weights that the first one's sample gives it.
    """
    query = f"select {_COLUMNS} from trace_tokens where trace_id = $id"
    rows = select_of_trace(reader.frames(), trace.lineage, trace.trace_id, query, id=trace.trace_id)
    if within is not None:
        rows = rows.filter(pl.col("message").is_in(list(within)))
    rows = with_texts(reader, trace, rows) if texts else rows
    rows = rows.select(pl.col(name).cast(kind) for name, kind in TOKENS.items() if name in rows.columns)
    return rows.with_columns(pl.col("ratio", "mismatch").fill_nan(None))


POLICIES = {"message": pl.Int32, "start": pl.Int64, "num_tokens": pl.Int64, "policy_key": pl.String}
POLICIES |= {"policy_version": pl.Int64}
"""The columns of table token_policies that tell which policy sampled which tokens of a trace."""


def token_policies(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the runs of tokens by policy, in order; none of a trace that one policy sampled."""
    rows = reader.frames().rows(message_works(reader, trace), "token_policies")
    rows = rows.filter(trace_id=trace.trace_id).sort("message", "start")
    return rows.select(pl.col(name).cast(kind) for name, kind in POLICIES.items()).collect()

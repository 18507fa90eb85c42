"""Tokenizers: the texts of a trace's token ids, where the tokenizer of the policy that sampled it is to be found."""

from collections.abc import Iterator

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data.trace import Found
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, TokenTexts, tokenizer_of

TEXTS = {"text": pl.String, "special": pl.Boolean}


def with_texts(library: Library, found: Found, tokens: pl.DataFrame) -> pl.DataFrame:
    """Return tokens, which have the columns message and token_id, with `text` and `special`.

    The texts are for people: bytes that are no whole character are named, as TokenText.shown has them. Both columns are
    null where there is no tokenizer.
    """
    texts, _ = tokenizer(library, found)
    if texts is None:
        return tokens.with_columns(pl.lit(None, kind).alias(name) for name, kind in TEXTS.items())
    pieces = [
        piece
        for (_,), part in tokens.group_by("message", maintain_order=True)
        for piece in texts.of(part["token_id"].to_list(), begins=False)
    ]
    return tokens.with_columns(
        pl.Series("text", [piece.shown for piece in pieces], pl.String),
        pl.Series("special", [piece.special for piece in pieces], pl.Boolean),
    )


def tokenizer(library: Library, found: Found) -> tuple[TokenTexts | None, str]:
    """Return the tokenizer of a trace; where there is none, None and why: token ids can be looked at all the same."""
    policy = str(found.row["policy_key"]) or _rendered_for(library, found)
    try:
        texts = tokenizer_of(library.store, library.config(found.run), policy, _other_policies(library, found))
    except TokenizerUnreadable as error:
        return None, str(error)
    return texts, "" if texts else "no tokenizer of the policy that sampled it is at hand"


def _rendered_for(library: Library, found: Found) -> str:
    """Return a policy whose tokenizer made the tokens of a text that none sampled: what is trained on is of the run."""
    return next(_other_policies(library, found), "") if found.row["trainable"] else ""


def _other_policies(library: Library, found: Found) -> Iterator[str]:
    """Yield the policies of the run, the newest first: their tokenizer is the same."""
    made = library.frames(found.run).graph.makers("policies")
    yield from (work.key for work in reversed(made))

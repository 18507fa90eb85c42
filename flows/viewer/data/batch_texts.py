"""The texts of packed tokens: what the tokenizer of the run's policies makes of their ids."""

from collections.abc import Sequence

from flows.queries.store_reader import Library
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, tokenizer_of


def texts(library: Library, run: str, ids: Sequence[int]) -> list[tuple[str, bool]]:
    """Return what each token adds to the text of a sample, and whether it is a special one.

    Where the tokenizer is gone or damaged, the ids stand for the texts.
    """
    policies = [work.key for work in library.frames(run).graph.makers("policies")]
    try:
        found = tokenizer_of(library.store, library.config(run), policies[-1], policies[::-1]) if policies else None
    except TokenizerUnreadable:
        found = None
    if found is None:
        return [(f"⟨{number}⟩", False) for number in ids]
    return [(each.shown, each.special) for each in found.of(ids)]

"""Whether an engine that someone else runs makes the same tokens of a text as a tokenizer that lies here."""

from itertools import zip_longest
from pathlib import Path

from tasks.inference.engine.client import Engine

TEXT = (
    "The quick brown fox, 12345 + 67.89 = ?\n\n\tdef f(x): return {'a': [x]}  # naïve café, Größe; it's <b>bold</b>\r\n"
    "你好,世界。 Привет! こんにちは 한국어 مرحبا 🙂🚀   $\\frac{a}{b}$ hexadecimal 0xDEADBEEF internationalisation\n"
)
"""Words, numbers, code, several scripts and white space: what tokenizers cut in different ways."""


def difference(engine: Engine, tokenizer: str | Path) -> str:
    """Return how an engine's tokens of a text differ from those of the tokenizer in a directory; empty if they do not.

    The text holds every control token of the tokenizer too. Raises EngineError where the engine makes none of it.
    """
    from renderers.base import load_tokenizer

    own = load_tokenizer(str(tokenizer))
    control = own.get_added_vocab()
    text = TEXT + "".join(sorted(control, key=lambda token: (control[token], token)))
    here, there = own.encode(text, add_special_tokens=False), engine.tokenize(text)
    for place, (ours, theirs) in enumerate(zip_longest(here, there)):
        if ours != theirs:
            return (
                f"token {place} of a text of {len(here)} is {theirs} there and {ours} here ({own.decode(ours or 0)!r})"
            )
    return ""

"""Whole messages: what a refusal says, word for word, since it must tell what, where, what is safe and what to do."""

import re


def exactly(message: str) -> str:
    """Return a pattern for `pytest.raises(match=...)` of this message and no other."""
    return rf"\A{re.escape(message)}\Z"

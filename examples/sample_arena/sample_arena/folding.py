"""Folding: user messages one after another made one, as templates of many models want turns to alternate."""

from collections.abc import Mapping, Sequence
from typing import Any

SEPARATOR = "\n\n"


def fold(messages: Sequence[Any]) -> list[Any]:
    """Return messages with each run of user texts made one, its texts apart by a blank line.

    Messages are mappings or objects, and stay what they are; fields beside role and content are kept. Left alone are
    messages of other roles, content that is no text (parts with images), and neighbours whose other fields differ.
    Folding twice is folding once.
    """
    folded: list[Any] = []
    for message in messages:
        if folded and (joined := _joined(folded[-1], message)) is not None:
            folded[-1] = joined
        else:
            folded.append(message)
    return folded


def _joined(first: Any, second: Any) -> Any | None:
    """The two as one message, or None where they must stay two."""
    one, other = _fields(first), _fields(second)
    texts = [one.get("content"), other.get("content")]
    if one.get("role") != "user" or other.get("role") != "user" or type(first) is not type(second):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    rest, more = ({name: each[name] for name in each if name != "content"} for each in (one, other))
    if any(name in rest and rest[name] != value for name, value in more.items()):
        return None
    content = SEPARATOR.join(texts)
    if isinstance(first, Mapping):
        return {**one, **more, "content": content}
    return first.model_copy(update={**more, "content": content})


def _fields(message: Any) -> dict[str, Any]:
    return dict(message) if isinstance(message, Mapping) else dict(message.__dict__, **(message.model_extra or {}))

"""Digests that the commits of a log and its head carry, and words for what is wrong with a file that lost its own.

A text is sealed when the first empty digest in it is replaced by the SHA-256 of all of it. Commits of other programs,
and of this one before it had seals, carry none: they are checked for being whole alone.
"""

import hashlib
import json
from typing import Any, NamedTuple

UNSEALED = {"timestamp", "operation", "operationParameters", "witness", "actions", "engineInfo", "clientVersion"}
"""Keys of a commitInfo that this program wrote before there were seals; deltalake, which wrote the first, adds two."""


class Head(NamedTuple):
    """The newest commit of a log, as a file beside it says: its version, and the SHA-256 of its file."""

    version: int
    sha256: str


def seal(text: str) -> bytes:
    """Put the digest of a text in the place of the first empty one, `"digest":""`, in it."""
    return text.replace('"digest":""', f'"digest":"{_sha256(text.encode())}"', 1).encode()


def is_sealed(data: bytes, digest: object) -> bool:
    """Say whether a text, but for the digest in it, is what the digest was made of."""
    said = str(digest).encode(errors="replace")
    return _sha256(data.replace(b'"digest":"%b"' % said, b'"digest":""', 1)).encode() == said


def commit_problem(data: bytes) -> str:
    """What is wrong with the file of a commit: it is cut off, torn or was altered; empty where nothing is."""
    try:
        actions: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
        (info,) = [dict(action["commitInfo"]) for action in actions if "commitInfo" in action]
        said = int(info.get("actions", len(actions) - 1))
    except (ValueError, TypeError, KeyError, AttributeError):
        # What stops anywhere was cut; what goes on to the end of a line has lost something before it.
        return "is torn: not every line of it is JSON" if data.endswith(b"\n") else "is cut off"
    # The commit's word on itself is a line as well; that of a commit by another program has no count.
    if len(actions) - 1 < max(said, 1):
        return f"is cut off: {len(actions) - 1} of {max(said, 1)} actions are left"
    altered = len(actions) - 1 != said
    if "digest" in info:
        if not data.endswith(b"\n"):
            return "is cut off: its last line does not end"
        altered |= not is_sealed(data, info["digest"])
    elif "witness" in info:  # one of ours; a bit may have been flipped in the word digest itself
        altered |= bool(info.keys() - UNSEALED)
    return "was altered: its digest is another" if altered else ""


def head_text(head: Head) -> bytes:
    """The text of a file that says which commit is the newest."""
    return seal(json.dumps({"digest": "", **head._asdict()}, separators=(",", ":")))


def parse_head(data: bytes) -> Head | None:
    """Read such a file; None where it is empty, as a loss of power leaves it. Raises ValueError for any other text."""
    if not data:
        return None
    content = json.loads(data)
    if not (isinstance(content, dict) and is_sealed(data, content.pop("digest", ""))):
        raise ValueError("its digest is another")
    return Head(**content)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""Reading the end of a service's log for people, without the secrets that the service was given."""

import re
from collections.abc import Mapping
from pathlib import Path

SHOWN_LINES = 20
SHOWN_CHARACTERS = 500
"""Longest line that is shown whole: a message is read by people, and one line may be as long as a log."""
_READ_BYTES = 64 * 1024
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8


def last_lines(log: Path, env: Mapping[str, str], count: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log, with the secrets of `env` left out and long lines without their middle."""
    hidden = secrets(env)
    try:
        with log.open("rb") as file:
            begin = max(0, log.stat().st_size - _READ_BYTES)
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    for secret in hidden:
        text = text.replace(secret, "***")
    if begin:
        text = text[max(map(len, hidden), default=0) :]  # a secret may have been cut there, and so was not found
    return [_shortened(line) for line in text.splitlines()[-count:]]


def _shortened(line: str) -> str:
    if len(line) <= SHOWN_CHARACTERS:
        return line
    half = SHOWN_CHARACTERS // 2
    return f"{line[:half]} [{len(line) - 2 * half} characters] {line[-half:]}"


def secrets(env: Mapping[str, str]) -> list[str]:
    """Return the values that must not be shown: those of variables named like secrets, unless too short to be one."""
    return [value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET]

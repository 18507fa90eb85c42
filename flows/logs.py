"""Reading the end of a service's log for people, without the secrets that the service was given."""

import re
from collections.abc import Mapping
from pathlib import Path

SHOWN_LINES = 20
_READ_BYTES = 64 * 1024
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8


def last_lines(log: Path, env: Mapping[str, str], count: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log, with the secrets of `env` left out."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    for secret in secrets(env):
        text = text.replace(secret, "***")
    return text.splitlines()[-count:]


def secrets(env: Mapping[str, str]) -> list[str]:
    """Return the values that must not be shown: those of variables named like secrets, unless too short to be one."""
    return [value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET]

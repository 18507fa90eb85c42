"""Pages to files: what an address shows, written as one static file without a browser."""

import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from configs.run import RunConfig
from flows.viewer.addresses import PATTERNS
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, NotThere
from flows.viewer.web.app import page_of
from flows.viewer.web.saving import saved


def main(address: str, file: str, store: str = "") -> int:
    """Write the page of an address to a file and say so; return the exit status.

    Raises NotThere, BadQuestion where the file cannot be written, LayoutError where there is no store.
    """
    print(save_page(Library.at(store or RunConfig().store), address, Path(file)))
    return 0


def save_page(library: Library, address: str, file: Path) -> str:
    """Write the page of an address to a new file or over an old one; return a sentence that says so."""
    name, asked = taken_apart(address)
    data = saved(page_of(name)(library.still(), asked), asked)
    try:
        file.write_bytes(data)
    except OSError as error:
        raise BadQuestion(f"the page cannot be written to {file}: {error.strerror}; name another file") from error
    return f"{address} is in {file}: one file of {len(data)} bytes, which loads nothing"


def taken_apart(address: str) -> tuple[str, Asked]:
    """Return which page answers an address, which may have a host before it, and what it is asked. Raises NotThere."""
    parts = urlsplit(address)
    for name, pattern in PATTERNS.items():
        fits = re.sub(r"\{(\w+)(?::path)?\}", r"(?P<\1>[^/]+)", pattern)
        if match := re.fullmatch(fits, parts.path):
            path = {key: unquote(value) for key, value in match.groupdict().items()}
            asked = {key: value for key, value in parse_qsl(parts.query) if key not in ("format", "token")}
            return name, Asked(parts.path, path, asked)
    raise NotThere(f"there is no page at {address!r}; pages are at {', '.join(PATTERNS.values())}")

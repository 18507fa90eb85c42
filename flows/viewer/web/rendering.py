"""Rendering: a page as HTML or as JSON. Whatever is put into a template is escaped, and the page made visible."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.viewer import addresses, words
from flows.viewer.page import Asked, Page, plain
from flows.viewer.texts import visible

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"


def as_html(page: Page, asked: Asked, mark: str = "", saved: str = "") -> bytes:
    """Return a page as HTML in UTF-8. `mark` is that of the library where the page may change; see `Library.mark`.

    `saved` is when it was saved, of a page that is kept as a file.
    """
    given = {**page.values, "page": page, "asked": asked, "mark": mark, "saved": saved}
    # All of it at once: also what filters, macros and drawings put together, and no part of a page can forget it.
    return visible(templates().get_template(page.template).render(given)).encode("utf-8", "replace")


def as_json(page: Page) -> bytes:
    """Return what a page says as JSON, all of it, in ASCII: whatever a text holds, it reads back as it was."""
    return json.dumps(plain(page.values), allow_nan=False).encode("ascii")


@cache
def templates() -> Environment:
    """Return the templates: every value is escaped, a missing name is an error, None is a dash and never a zero."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters |= words.FILTERS
    found.globals |= {"at": addresses, "asset": asset, **drawings()}
    return found


def _shown(value: Any) -> Any:
    return words.DASH if value is None else value


def drawings() -> Mapping[str, Any]:
    """Return the drawings that templates may call, by name; each gives SVG as Markup, its texts escaped."""
    from flows.viewer.drawing import DRAWINGS

    return DRAWINGS


@cache
def asset(name: str) -> str:
    """Return the address of a file in `static`, another one when its content is."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"

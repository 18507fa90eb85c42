"""Renders a page as HTML, as JSON, or as one static file to keep or send, which loads nothing.

Whatever is put into a template is escaped, and the page made visible.
"""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.queries.request import PageRequest, plain
from flows.reporting import formats
from flows.reporting.formats import visible
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.drawings import chart, segment, sparkline
from flows.viewer.pages.trace import TONES

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"


def as_html(page: Page, request: PageRequest, mark: str = "", saved: str = "") -> bytes:
    """Return a page as HTML in UTF-8. `mark` is that of the reader where the page may change.

    `saved` is when it was saved, of a page that is kept as a file.
    """
    given = {**page.values, "page": page, "request": request, "mark": mark, "saved": saved}
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
        # A value that a page forgot is a fault that is seen, and not an empty place that reads as nothing.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_or_dash,
    )
    found.filters |= formats.FILTERS
    found.globals |= {"at": addresses, "asset": asset, "TONES": TONES | {"evaluated": "good"}}
    found.globals |= {drawing.__name__: drawing for drawing in (chart, segment, sparkline)}
    return found


def _or_dash(value: Any) -> Any:
    return formats.DASH if value is None else value


@cache
def asset(name: str) -> str:
    """Return the address of a file in `static`, another one when its content is."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([a-z_/]+\.css)\?v=[0-9a-f]+">')
_SCRIPT = re.compile(r'<script src="/static/([a-z_/]+\.js)\?v=[0-9a-f]+" defer></script>')
_LINK = re.compile(r' (?:href|action)="(?!#|data:|/static/)[^"]*"')
"""What leads out of the page. Text cannot hold one: its quotation marks are escaped."""
_CHARSET = '<meta charset="utf-8">'


def as_file(page: Page, request: PageRequest) -> bytes:
    """Return a page as one HTML file in UTF-8, its style and scripts inside, its links without an aim.

    Only the scripts and styles that are inside, by their digests, count, by the file's own policy.
    """
    text = as_html(page, request, saved=formats.moment(datetime.now(UTC))).decode()
    text = _LINK.sub("", text)  # before our own files are inside: their digests are those of what is written
    text, styles = _inline(text, _STYLE, "style")
    text, scripts = _inline(text, _SCRIPT, "script")
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'{_CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return text.replace(_CHARSET, meta, 1).encode("utf-8", "replace")


def _inline(text: str, pattern: re.Pattern[str], tag: str) -> tuple[str, str]:
    """Return the text with the files that it loads put inside, and what a policy must allow for them to count."""
    hashes: list[str] = []

    def put(found: re.Match[str]) -> str:
        source = (STATIC / found[1]).read_text(encoding="utf-8")
        # A policy by digest lets these scripts count and nothing that a text might smuggle in between.
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
        return f"<{tag}>{source}</{tag}>"

    return pattern.sub(put, text), " ".join(hashes) or "'none'"


def file_name(page: Page) -> str:
    """Return a name for the file: letters, digits and dashes of the title alone."""
    # 80 characters: names of files end at 255 bytes, and a title may hold any text of any length.
    return (re.sub(r"[^A-Za-z0-9]+", "-", page.title).strip("-")[:80] or "page") + ".html"

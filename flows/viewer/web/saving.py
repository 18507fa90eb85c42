"""Saving: a page as one static file to keep or send: nothing is loaded, nothing leads back to the store."""

import base64
import hashlib
import re
from datetime import UTC, datetime

from flows.viewer.page import Asked, Page
from flows.viewer.web.rendering import STATIC, as_html
from flows.viewer.words import moment

_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([a-z_]+\.css)\?v=[0-9a-f]+">')
_SCRIPT = re.compile(r'<script src="/static/([a-z_]+\.js)\?v=[0-9a-f]+" defer></script>')
_LINK = re.compile(r' (?:href|action)="(?!#|data:|/static/)[^"]*"')
"""What leads out of the page. Text cannot hold one: its quotation marks are escaped."""
_CHARSET = '<meta charset="utf-8">'


def saved(page: Page, asked: Asked) -> bytes:
    """Return a page as one HTML file in UTF-8, its style and scripts inside, its links without an aim.

    Only the scripts and styles that are inside, by their digests, count, by the file's own policy.
    """
    text = as_html(page, asked, saved=moment(datetime.now(UTC))).decode()
    text = _LINK.sub("", text)  # before our own files are inside: their digests are those of what is written
    text, styles = _inside(text, _STYLE, "style")
    text, scripts = _inside(text, _SCRIPT, "script")
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'{_CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return text.replace(_CHARSET, meta, 1).encode("utf-8", "replace")


def _inside(text: str, pattern: re.Pattern[str], tag: str) -> tuple[str, str]:
    """Return the text with the files that it loads put inside, and what a policy must allow for them to count."""
    hashes: list[str] = []

    def put(found: re.Match[str]) -> str:
        source = (STATIC / found[1]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
        return f"<{tag}>{source}</{tag}>"

    return pattern.sub(put, text), " ".join(hashes) or "'none'"


def file_name(page: Page) -> str:
    """Return a name for the file: letters, digits and dashes of the title alone."""
    return (re.sub(r"[^A-Za-z0-9]+", "-", page.title).strip("-")[:80] or "page") + ".html"

"""Texts of an enemy on every page: what is data stays text, and nothing acts or hides; JSON holds it as it was."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from flows.queries.request import plain
from flows.queries.store_reader import StoreReader
from flows.viewer import rendering
from flows.viewer.routes import parsed_address, read_page
from tests.fixtures.hostile import ALL, acting, hostile_store
from tests.flows.viewer.looking import Elements, everything, visitor

pytestmark = pytest.mark.engine
MARKUP = str.maketrans("<>&\"'`{}[]|=;%", "()+-------:.--")
OURS = re.compile(r"/|#|\?|data:image/svg\+xml,%3Csvg xmlns='http://www\.w3\.org/2000/svg'")
"""Where an address on a page may lead: into the viewer, into the page, and the sign of the tab."""
OUR_SCRIPT = r"<script src=\"\{\{ asset\('[a-z_/]+\.js'\) \}\}\" defer>"
RUNS = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|setAttribute\(\"style"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    store = hostile_store(tmp_path_factory.mktemp("hostile") / "store").store
    return StoreReader.at(store.root.address)


@pytest.fixture(scope="module")
def pages(library):
    """Every kind of page twice at least with its request; traces in colours and searched as well."""
    known = everything(library)
    searched = [f"{each}?{urlencode({'color': 'mask', 'q': ALL})}" for each in known if "/traces/" in each]
    requests = [parsed_address(address) for address in (*known, *searched)]
    return [(read_page(name, library, request), request) for name, request in requests]


def harmless(value):
    """The same values of the same lengths, in which no text holds a character of markup."""
    if isinstance(value, dict):
        return {name if name.isidentifier() else harmless(name): harmless(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [harmless(item) for item in value]
    return value.translate(MARKUP) if isinstance(value, str) and not value.startswith("/") else value


def test_no_element_and_no_attribute_comes_from_data(pages):
    for page, request in pages:
        twin = replace(page, title=harmless(page.title), values=harmless(dict(page.values)))
        shown, other = (Elements(rendering.as_html(each, request).decode()) for each in (page, twin))
        assert shown.tags == other.tags, request
        assert shown.odd == [], (request, shown.odd)


def test_nothing_on_a_page_runs_or_leads_elsewhere(pages):
    for page, request in pages:
        shown = Elements(rendering.as_html(page, request).decode())
        assert not {tag for tag, _ in shown.tags} & {"iframe", "object", "embed", "img", "base", "style", "textarea"}
        for tag, name, value in shown.values:
            assert not name.startswith("on") and name not in ("style", "srcdoc", "xlink:href"), (request, tag, name)
            if name in ("href", "src", "action", "formaction"):
                assert OURS.match(value) and not value.startswith("//"), (request, tag, name, value[:80])


def test_no_character_acts_or_hides(pages):
    for page, request in pages:
        for form in (rendering.as_html, rendering.as_file):
            text = form(page, request).decode()
            assert acting(text) == set(), request
            drawn = [json.loads(value) for _, name, value in Elements(text).values if name == "data-chart"]
            assert acting(" ".join(texts(drawn))) == set(), request


def test_json_reads_back_as_what_the_page_says(pages):
    for page, request in pages:
        made = rendering.as_json(page)
        assert json.loads(made) == plain(page.values), request
        assert made.isascii()
    assert any(ALL in each for page, _ in pages for each in texts(plain(page.values)))


def texts(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, str):
        yield value


def test_a_saved_page_loads_nothing_leads_nowhere_and_runs_only_what_is_ours(pages):
    for page, request in pages:
        text = rendering.as_file(page, request).decode()
        shown = Elements(text)
        policy = next(value for *place, value in shown.values if place == ["meta", "content"] and "src" in value)
        for tag in ("script", "style"):
            inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digests = {base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside}
            allowed = re.search(rf"{tag}-src ([^;]*);", policy)
            assert allowed and set(allowed[1].split()) == {f"'sha256-{each}'" for each in digests}, request
            assert inside and [each for each in shown.tags if each[0] == tag] == [(tag, ())] * len(inside)
        aims = [value for _, name, value in shown.values if name in ("href", "src", "action")]
        assert all(value.startswith(("#", "data:image/svg+xml,")) for value in aims), request
        asking = [names for tag, names in shown.tags if tag == "button" and "type" not in names]
        assert len(asking) == 1, (request, "nobody is there to be asked: only what closes the list of keys is left")
        assert "default-src 'none'" in policy and "form-action 'none'" in policy and "unsafe" not in policy
        assert text.index("charset") < 1000 and text.index("Security-Policy") < text.index("<style>")


def test_the_sources_keep_to_what_cannot_be_made_to_run():
    for path in rendering.TEMPLATES.glob("*.html"):
        source = path.read_text()
        assert not re.search(r"\|\s*safe\b|autoescape|<style|\sstyle=|\son[a-z]+=|javascript:", source), path.name
        assert all(re.fullmatch(OUR_SCRIPT, tag) for tag in re.findall(r"<script[^>]*>", source))
    for path in rendering.STATIC.glob("*.js"):
        source = path.read_text()
        assert not re.search(RUNS, source), path.name
        assert "</script" not in source.lower() and "<!--" not in source
    for path in rendering.STATIC.glob("*.css"):
        assert not re.search(r"@import|url\(|</", path.read_text()), path.name


def test_errors_repeat_what_was_asked_as_text_alone(library):
    client = visitor(library)
    for text in ("<script>alert(1)</script>", "\x1b[31m", "\u202e", '"><img src=x onerror=alert(1)>', "{{7019*7057}}"):
        for address in ("/runs/base/steps/0", "/runs/base/search", "/"):
            for name in ("sort", "page", "format", "outcome", "search", "q", text):
                answer = client.get(address, params={name: text})
                assert answer.status_code in (200, 400), (address, name, answer.status_code)
                assert acting(answer.text) == set() and "49533083" not in answer.text
                assert not {"img", "iframe"} & {tag for tag, _ in Elements(answer.text).tags}

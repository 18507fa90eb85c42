"""What a page's JSON holds is written down, name by name: docs/viewing-json.md against pages of each kind."""

import re
from pathlib import Path

import pytest

from flows.viewer.addresses import PATTERNS
from flows.viewer.library import Library
from flows.viewer.web.app import page_of
from tests.flows.rehearsal import rehearse
from tests.flows.replays import RLOO, ask, walk
from tests.flows.viewer.looking import asked, one_of_each

pytestmark = pytest.mark.engine  # it opens a page of each kind: seconds
DOCUMENT = Path(__file__).parents[3] / "docs/viewing-json.md"
SAME = {"evaluation": "step"}
"""Pages whose names are those of another."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    root = tmp_path_factory.mktemp("json") / "store"
    rehearse(root, "base")
    walk(ask(root, name="fork", overrides=(RLOO,)))
    return Library.at(root)


def sections() -> dict[str, set[str]]:
    """Return the names that each page's section has in code type, and of what is everywhere under ''."""
    head, *parts = re.split(r"^## `(.+)`$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = {"": head, **dict(zip(parts[::2], parts[1::2], strict=True))}
    return {title: set(re.findall(r"`(\w+)`", text)) for title, text in texts.items()}


def test_every_value_of_every_page_is_written_down(library: Library) -> None:
    written = sections()
    everywhere = written.pop("")
    patterns = {name: pattern.replace(":path", "") for name, pattern in PATTERNS.items() if name != "compare_choice"}
    assert set(written) == set(patterns.values()), "a section for each page"
    missing = []
    for kind, address in one_of_each(library, "base", "fork").items():
        if kind == "compare_choice":
            continue
        name, question = asked(address)
        values = set(page_of(name)(library, question).values)
        said = written[patterns[kind]] | everywhere | written[patterns[SAME.get(kind, kind)]]
        missing += [(kind, each) for each in sorted(values - said)]
        assert kind == name and len(values) > 1
    assert missing == []

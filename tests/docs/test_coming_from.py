"""The pages for people who come from another trainer have the tables that are applied, and no others."""

from pathlib import Path

import pytest

from configs.trainers.__main__ import TRAINERS, tables

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", TRAINERS)
def test_a_page_has_the_tables_that_are_applied(name: str) -> None:
    page = (DOCS / f"coming-from-{name}.md").read_text(encoding="utf-8")
    place = f"write the output of `python -m configs.trainers {name}` to the end of docs/coming-from-{name}.md"
    assert page[page.index("## Keys side by side") :] == "\n".join(tables(TRAINERS[name])) + "\n", place

"""Links of all pages lead to files that are there, and the index of the docs names every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)")
"""The target of a relative link or picture, without a heading; addresses have a colon."""


def pages() -> list[Path]:
    """Return the pages of this checkout; what begins with a dot (environments, caches) is not ours."""
    found = sorted(ROOT.rglob("*.md"))
    return [page for page in found if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)]


def targets(page: Path) -> list[str]:
    """Return the relative links of a page; what looks like one in a block of code is none."""
    return LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


LINKS = [(page.relative_to(ROOT), target) for page in pages() for target in targets(page)]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=str)
def test_links_lead_somewhere(page: Path, target: str) -> None:
    assert (ROOT / page.parent / target).exists()


def test_links_are_found() -> None:
    """Of pages of every kind, so that the above is not vacuous."""
    assert (Path("README.md"), "docs/replay.md") in LINKS
    assert (Path("docs/prefect.md"), "images/prefect-form.png") in LINKS
    assert {page.parts[0] for page, _ in LINKS} >= {"README.md", "CONTRIBUTING.md", "docs"}


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_an_index_names_every_page_once(folder: str) -> None:
    named = [Path(target).name for target in targets(ROOT / folder / "README.md") if not target.startswith("..")]
    named = ["decisions" if name == "README.md" else name for name in named]
    others = [page.name for page in (ROOT / folder).iterdir() if page.suffix == ".md" and page.name != "README.md"]
    assert sorted(named) == sorted([*others, *(["decisions"] if folder == "docs" else [])])

"""The pages for people who come from another trainer have the tables that are applied, and no others."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from flows.exchange.trainers import PRIME_RL, TRL, ForeignTrainer

DOCS = Path(__file__).parents[2] / "docs"


def tables(trainer: ForeignTrainer) -> str:
    """Return the end of a page: a row for each setting here, then the keys without a counterpart."""
    rows = [f"| {_names(old)} | `{new}` | {trainer.notes.get(new, '')} |" for new, old in trainer.keys.items()]
    missing = [f"| {_names(old)} | {why} |" for old, why, _ in trainer.missing]
    heads = (f"| {trainer.name} | here | what differs |", "|---|---|---|"), ("| keys | why |", "|---|---|")
    first = ["## Keys side by side", "", *heads[0], *rows]
    return "\n".join([*first, "", "## Without a counterpart", "", *heads[1], *missing, ""]).replace("|  |", "| |")


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


@pytest.mark.parametrize("trainer", [TRL, PRIME_RL], ids=lambda trainer: trainer.name)
def test_a_page_has_the_tables_that_are_applied(trainer: ForeignTrainer) -> None:
    path = DOCS / f"coming-from-{trainer.name.lower()}.md"
    begin, _, _ = path.read_text(encoding="utf-8").partition("## Keys side by side")
    assert path.read_text(encoding="utf-8") == begin + tables(trainer), f"{path}: its tables are not those applied"

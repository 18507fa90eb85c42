"""The table of docs/models.md has every family that is tested, with what its tests show."""

import re
from pathlib import Path

from tests.fixtures.family_models import FAMILIES, SERVED

PAGE = Path(__file__).parents[2] / "docs/models.md"


def test_the_table_says_of_each_family_what_is_tested():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    rows = {family: line.split(" | ")[2:] for line in lines for family in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert rows.keys() == FAMILIES.keys()
    assert all(packed == "yes" for packed, _ in rows.values())
    assert {family for family, (_, engine) in rows.items() if engine == "yes |"} == {*SERVED}

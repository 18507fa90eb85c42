"""The table of docs/models.md has every family that is tested, with what its tests show and what its config refuses."""

import re
from pathlib import Path

import pytest

from configs.checks.run import layers_with_state
from tests.fixtures.family_models import FAMILIES, ROUTED, SERVED, SERVED_IN_HALF, WITHOUT_LORA

PAGE = Path(__file__).parents[2] / "docs/models.md"
COLUMNS = ["layers", "packed", "engine", "cuda", "replay", "lora", "compile", "context"]


@pytest.fixture(scope="module")
def table():
    """By family, the cells of its row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [(line.split(" | ")[0], line.strip("| ").split(" | ")[1:]) for line in lines]
    return {
        family: dict(zip(COLUMNS, row, strict=True)) for names, row in cells for family in re.findall(r"`(\w+)`", names)
    }


def test_the_table_says_of_each_family_what_is_tested(table):
    assert table.keys() == FAMILIES.keys()
    assert {row["packed"] for row in table.values()} == {"yes"}
    in_steps = {family for family, row in table.items() if row["engine"].startswith("two steps")}
    assert in_steps == {*SERVED, *SERVED_IN_HALF, "qwen3_moe"}
    assert {family for family in in_steps if "bfloat16" in table[family]["engine"]} == {*SERVED_IN_HALF}
    assert {family for family, row in table.items() if row["replay"] == "yes"} == {*ROUTED}
    assert {family for family, row in table.items() if row["lora"] != "all"} == {*WITHOUT_LORA}


def test_the_table_says_what_is_refused(table):
    for family, config in FAMILIES.items():
        stateful = bool(layers_with_state(config))
        by_segment = stateful or family == "gpt_oss" or "attn_logit_softcapping" in config
        assert (table[family]["compile"], table[family]["context"]) == (
            "no" if by_segment else "yes",
            "no" if stateful else "yes",
        ), family

"""What pages write, and where it leads: every value is documented, the way to every page."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from flows.queries.charts import charts
from flows.queries.metrics import StepNumbers
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.addresses import PATTERNS
from flows.viewer.rendering import PAGES, parsed_address
from tasks.metrics.figures import ALL
from tests.fixtures.builders import message, trace
from tests.flows.viewer.hand_made import RUN, HandMade
from tests.flows.viewer.looking import answer, one_of_each, values


@pytest.fixture(scope="module")
def pages(forked: StoreReader) -> dict[str, str]:
    """The text of a page of each kind, of a run of two steps and its fork."""
    found = {name: answer(forked, address) for name, address in one_of_each(forked).items()}
    assert {status for status, _ in found.values()} == {200}
    return {name: text for name, (_, text) in found.items()}


def crumbs(text: str) -> list[str]:
    """The names on the way to a page, itself last."""
    way = text.partition('<nav class="crumbs"')[2].partition("</nav>")[0]
    return [each.strip() for each in re.findall(r">([^<>]+)</(?:a|h1)>", way)]


def test_the_way_to_every_page_begins_at_the_runs(pages: dict[str, str]) -> None:
    assert {"run", "step", "batch", "row", "trace", "example", "compare", "compare_step"} <= set(pages)
    for name, text in pages.items():
        way = crumbs(text)
        assert way[0] == "Runs" and way.count("Runs") == 1, name
        assert name in ("runs", "any_trace") or len(way) > 1, name


def test_a_batch_and_its_step_call_what_was_measured_the_same(pages: dict[str, str]) -> None:
    for title in ("Loss", "RL component", "Gradient norm", "Mismatch KL", "Masked share", "Learning rate"):
        assert f"<dt>{title}</dt>" in pages["step"] and f"<dt>{title}</dt>" in pages["batch"], title
    for raw in ("grad norm", "rl loss", "mismatch kl", "masked fraction"):
        assert raw not in pages["batch"], raw


def test_a_setting_is_written_as_a_config_file_has_it(pages: dict[str, str]) -> None:
    (row,) = re.findall(r'<tr><td class="mono">algorithm\.type</td>.*', pages["compare"])
    assert "&#34;grpo&#34;" in row and "&#34;rloo&#34;" in row
    assert ">False<" not in pages["compare"] and ">false<" in pages["compare"]


def test_an_example_that_two_policies_tried_leads_to_both_side_by_side(tmp_path: Path) -> None:
    made = HandMade(tmp_path / "store")
    for step, name in enumerate(("before", "after")):
        made.step([trace(name, example_id="again", policy_version=step)], [message(name, 0)], step=step)
    made.step([trace("once", example_id="once")], [message("once", 0)], step=2)
    library = StoreReader.at(tmp_path / "store")

    def beside(example_id: str) -> list[str]:
        _, text = answer(library, addresses.example(RUN, trace("x")["environment"], example_id))
        return [unescape(each) for each in re.findall(r'href="([^"]*/compare/[^"]*)"', text)]

    (way,) = beside("again")
    assert "step_a=0" in way and "step_b=1" in way
    sides = values(library, way)
    assert [[each["trace_id"] for each in sides[f"of_{side}"]["attempts"]] for side in "ab"] == [["before"], ["after"]]
    assert beside("once") == []


def test_what_filters_took_is_named_beside_each_filter() -> None:
    values = {(ALL, f"filters/{name}"): 0.5 for name in ("is_filtered", "zero_advantage")}
    work: Any = None  # charts look at the numbers alone
    (found,) = (chart for section in charts([StepNumbers(work, values)], []) for chart in section["charts"])
    assert [each["name"] for each in found["series"]] == ["left out", "zero advantage"]


DOCUMENT = Path(__file__).parents[3] / "docs/reference/tables.md"
SAME = {"evaluation": "step"}
"""Pages whose names are those of another."""


def sections() -> dict[str, set[str]]:
    """Return the names that each page's section has in code type, and of what is everywhere under ''."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("\n## JSON of the viewer's pages\n")[2]
    head, *parts = re.split(r"^### `(.+)`$", text, flags=re.MULTILINE)
    texts = {"": head, **dict(zip(parts[::2], parts[1::2], strict=True))}
    return {title: set(re.findall(r"`(\w+)`", text)) for title, text in texts.items()}


@pytest.mark.engine  # it opens a page of each kind: seconds
def test_every_value_of_every_page_is_written_down(forked: StoreReader) -> None:
    written = sections()
    everywhere = written.pop("")
    patterns = {name: pattern.replace(":path", "") for name, pattern in PATTERNS.items() if name != "compare_choice"}
    assert set(written) == set(patterns.values()), "a section for each page"
    missing = []
    for kind, address in one_of_each(forked, "base", "fork").items():
        if kind == "compare_choice":
            continue
        name, question = parsed_address(address)
        values = set(PAGES[name](forked, question).values)
        said = written[patterns[kind]] | everywhere | written[patterns[SAME.get(kind, kind)]]
        missing += [(kind, each) for each in sorted(values - said)]
        assert kind == name and len(values) > 1
    assert missing == []

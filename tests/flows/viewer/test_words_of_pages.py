"""What pages call things, and the way back from each: the same words everywhere, the field's and not a column's."""

import re

import pytest

from flows.viewer.library import Library
from flows.viewer.web.app import page_of, respond
from tests.flows.rehearsal import rehearse
from tests.flows.replays import RLOO, ask, walk
from tests.flows.viewer.looking import asked, one_of_each


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of a page of each kind, of a run of two steps and its fork."""
    root = tmp_path_factory.mktemp("words") / "store"
    rehearse(root, "base", steps=2)
    walk(ask(root, name="fork", overrides=[RLOO]))
    library = Library.at(root)
    found = {}
    for name, address in one_of_each(library).items():
        kind, question = asked(address)
        answer = respond(page_of(kind), library, question)
        assert answer.status_code == 200, address
        found[name] = bytes(answer.body).decode()
    return found


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

"""What an enemy wrote, in pages of markdown: a reader of CommonMark or of GitHub's finds nothing in them but text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.orchestration.gate_answers import LONGEST_TEXT, summary
from flows.reporting import artifacts
from flows.reporting.artifacts import escape
from tasks.runtime.services import Question, Shown
from tests.fixtures.hostile import ALL, READERS, SHORT, TEXTS, acting, kinds, tokens

PLAIN = {"inline", "text", "text_special", "softbreak", "paragraph_open", "paragraph_close"}


def test_the_readers_find_what_is_not_escaped():
    found = kinds("\n\n".join(TEXTS.values()))
    assert {"html_block", "html_inline", "link_open", "image", "heading_open", "table_open", "fence"} <= found
    assert "link_open" in kinds("https://evil.example") and "link_open" in kinds("a@evil.com")


@given(st.text(st.sampled_from("a1. -+=*_`[]()!<>&|~#:/\\@\n\twWhtps\x1b\u202e"), max_size=30))
def test_no_text_is_read_as_anything_else(text):
    line = escape(text)
    assert kinds(line) <= PLAIN
    read = "".join(each.content for each in tokens(READERS[0], line) if each.type in ("text", "text_special"))
    assert "".join(read.split()) == "".join(text.replace("\x1b", "␛").replace("\u202e", "⟨U+202E⟩").split())


@given(st.text(st.sampled_from("a |\\\n`<"), max_size=20))
def test_a_cell_stays_a_cell(text):
    table = f"| a | b |\n|---|---|\n| {escape(text)} | end |"
    cells = [each for each in tokens(READERS[1], table) if each.type == "td_open"]
    assert len(cells) == 2


def question(texts, role="user"):
    rollout = Shown("best", SHORT[0] + TEXTS["markdown"], 1.0, tuple((role, text) for text in texts))
    return Question(0, "key", {}, (rollout,), 0.0)


@pytest.mark.parametrize("role", ["user", "-", "1.", "- [ ]", ">", "```", "<div>", *SHORT])
def test_a_gate_shows_texts_as_they_are(role):
    page = summary("run", question([*TEXTS.values(), ALL], role))
    found = {kind for kind in kinds(page) if not re.match("th|tr|td|tbody|table|heading|code_block", kind)}
    assert found <= PLAIN and not acting(page)
    blocks = [each.content for each in tokens(READERS[0], page) if each.type == "code_block"]
    assert len(blocks) == len([*filter(str.strip, (*TEXTS.values(), ALL))])
    assert any(TEXTS["script"] in block for block in blocks)


def test_a_gate_cuts_what_is_long_and_says_so():
    page = summary("run", question(["x" * LONGEST_TEXT + "y" * 7]))
    assert f"{'x' * LONGEST_TEXT} ... (7 more)\n" in page + "\n" and "y" not in page.split("user")[1]


def test_a_report_shows_names_and_one_curve_of_its_own():
    step = {"step": 0, "reward": 0.5, "tokens": 1, "seconds": {}, "update": None}
    for name in SHORT:
        page = artifacts.report(name, "javascript:alert(1)//https://x", [step])
        assert not kinds(page) & {"html_block", "html_inline", "link_open", "image"}
        (curve,) = [each for each in tokens(READERS[0], page) if each.type == "fence"]
        assert curve.content.startswith("reward 0.500, from 0 to 1\n")
        assert not acting(page)

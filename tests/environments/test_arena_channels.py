"""What of a reply others hear: by hand, and against random markup; verdicts that cannot be mistaken."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_arena.channels import Channels
from sample_arena.errors import ArenaError
from sample_arena.verdicts import Verdicts

from tests.fixtures.commands import cases


@cases(__file__, "replies")
def test_a_reply_is_taken_apart(raw, public, private):
    one = Channels("note").utterance("a", "talk", raw)
    assert (one.public, one.private, one.parse_error, one.raw) == (public, private, False, raw)
    assert (one.heard.member, one.heard.phase, one.heard.public) == ("a", "talk", public)
    assert set(vars(one.heard)) == {"member", "phase", "public"}


@cases(__file__, "broken_markup")
def test_broken_markup_is_flagged_and_what_may_be_a_thought_is_held_back(raw, public):
    one = Channels("note").utterance("a", "talk", raw)
    assert one.parse_error and one.public == public and "SECRET" not in one.private


@pytest.mark.parametrize("tag", ["think", "", "a b", "<note>", "Note", "a|b"])
def test_private_tags_that_would_be_mistaken_are_refused(tag):
    with pytest.raises(ArenaError, match="private tag"):
        Channels(tag)


PIECES = st.sampled_from(("<think>", "</think>", "<note>", "</note>", "T", " "))
WHOLE = re.compile(r"(?:[T ]|<think>[T ]*</think>|<note>(?:[T ]|<think>[T ]*</think>)*</note>)*")


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=10))
def test_random_markup_is_flagged_exactly_where_it_is_not_well_formed(pieces):
    raw = "".join(pieces)
    one = Channels("note").utterance("a", "talk", raw)
    assert one.parse_error == (WHOLE.fullmatch(raw) is None)
    without = re.sub(r"<think>[T ]*</think>", "", raw)
    if not one.parse_error:
        assert one.public == re.sub(r"<note>[T ]*</note>", "", without).strip()
        assert one.private == "\n".join(note.strip() for note in re.findall(r"<note>([T ]*)</note>", without)).strip()
    assert not re.search("think|note", one.public + one.private)


def test_a_judge_names_a_winner_or_nobody():
    verdicts = Verdicts({"<yes>": "affirmative", "<no>": "negative"})
    for said, winner in (
        ("<yes>", "affirmative"), ("so <NO>.", "negative"), ("yes", None), ("", None), ("<yes><no>", None),
        ("<no><no>", "negative"),
    ):  # fmt: skip
        assert verdicts.winner(said) == winner


@cases(__file__, "verdict_tokens")
def test_verdict_tokens_that_could_be_mistaken_are_refused(tokens):
    with pytest.raises(ArenaError, match="verdict token"):
        Verdicts(tokens)

"""The table of rollouts and the search over a run: what it reads, what it finds, and the sentence around a hit."""

import pytest

from flows.queries.conditions import Pattern, search_condition
from flows.queries.request import NotThere
from flows.queries.rollout_search import AROUND, describe_hits, search_run, text_around
from flows.queries.store_reader import StoreReader
from flows.queries.views import ROLLOUT_COLUMNS, relations
from storage.read.frames import Frames
from storage.read.sql import ask
from tasks.metrics.warnings import phrases_of
from tests.fixtures.builders import message, trace
from tests.flows.viewer.hand_made import RUN, HandMade, batch, credit

CALLS = '{"reasoning_content": "I think so", "tool_calls": [{"function": {"name": "dig", "arguments": "{}"}}]}'


@pytest.fixture
def library(tmp_path):
    """Two steps: a rollout of several messages, one with a call, one without a reply; then another, trained on."""
    made = HandMade(tmp_path / "store")
    several = [
        message("long", 0, content="Count!"),
        message("long", 2, parent=1, content="Go on."),
        message("long", 1, parent=0, sampled=True, content="One. Two."),
        message("long", 3, parent=2, sampled=True, content="Three <b>bold</b>. Four."),
        message("calls", 0, content="Dig"),
        message("calls", 1, parent=0, sampled=True, content=None, body=CALLS),
        message("mute", 0, content="Say nothing"),
    ]
    traces = [trace("long", reward=0.25), trace("calls", reward=None), trace("mute", num_output_tokens=0)]
    made.step(traces, several)
    streams = {"advantages": [0.0, 0.5], "rl_weights": [0.0, 1.0]}
    sample = credit("later", 0, [0, 1], streams)
    later = [message("later", 0), message("later", 1, parent=0, sampled=True, content="three")]
    made.step([trace("later", reward=0.75)], later, [sample], step=1, batches=[batch([sample])])
    return StoreReader.at(tmp_path / "store")


def test_the_texts_and_what_became_of_each_rollout(library):
    rows = library.frames(RUN)["rollouts"].select("trace_id", "prompt", "reply", "advantage", "outcome", "length")
    assert {row[0]: row[1:] for row in rows.collect().iter_rows()} == {
        "long": ("Count!\nGo on.", "One. Two.\nThree <b>bold</b>. Four.", None, "pending", 2),
        "calls": ("Dig", 'I think so\n[{"function":{"name":"dig","arguments":"{}"}}]', None, "pending", 2),
        "mute": ("Say nothing", None, None, "pending", 0),
        "later": ("text", "three", 0.5, "pending", 2),
    }
    assert library.frames(RUN)["rollouts"].collect().columns == list(ROLLOUT_COLUMNS)


def test_sql_has_long_texts_where_they_are_named(library):
    frames = Frames(library.store, relations)
    assert ask(frames, f"select trace_id from {RUN}.rollouts where reply ~ 'bold'").to_pylist() == [
        {"trace_id": "long"}
    ]
    assert "reply" not in ask(frames, "select * from rollouts").column_names
    assert ask(frames, "select count(*) as rollouts from traces").to_pylist() == [{"rollouts": 4}]


def test_sql_has_the_tokens_of_rollouts_with_their_weights(library):
    frames = Frames(library.store, relations)
    query = "select sum(rl_weight) as weight, count(*) as tokens from trace_tokens group by trace_id order by weight"
    assert ask(frames, f"{query} limit 1").to_pylist() == [{"weight": 1.0, "tokens": 6}]


def test_hits_with_a_count_for_each_step(library):
    found = search_run(library, RUN, search_condition("three"))
    assert found.rows["trace_id"].to_list() == ["long", "later"]
    assert found.counts.rows() == [(True, 0, 3, 1), (True, 1, 1, 1)] and found.first_step == 0
    assert search_run(library, RUN, search_condition("reward > 0.5 and reply ~ 'three'")).first_step == 1
    assert search_run(library, RUN, search_condition("nowhere")).first_step is None
    with pytest.raises(NotThere, match="nobody"):
        search_run(library, "nobody", search_condition("three"))


def test_a_hit_is_told_with_its_sentence(library):
    condition = search_condition("bold")
    (hit,) = describe_hits(library, RUN, search_run(library, RUN, condition).rows, condition)
    assert hit["piece"] == {
        "column": "reply",
        "before": "One. Two.\nThree <b>",
        "match": "bold",
        "after": "</b>. Four.",
    }
    assert (hit["trace_id"], hit["step"], hit["reward"], hit["outcome"]) == ("long", 0, 0.25, "pending")
    condition = search_condition("reward < 0.5")
    (hit,) = describe_hits(library, RUN, search_run(library, RUN, condition).rows, condition)
    assert hit["piece"]["before"].startswith("One. Two.") and hit["piece"]["match"] == ""
    condition = search_condition("length = 0 or reply ~ 'x'")
    (hit,) = describe_hits(library, RUN, search_run(library, RUN, condition).rows, condition)
    assert (hit["trace_id"], hit["piece"]["before"]) == ("mute", ""), "it has no reply"


@pytest.mark.parametrize(
    ("text", "regex", "around"),
    [
        ("a. B cold x. D", "(?i)COLD", ("a. B ", "cold", " x. D")),
        ("x" * 500 + "cold" + "y" * 500, "cold", ("x" * AROUND, "cold", "y" * AROUND)),
        ("none", r"\C", ("none", "", "")),
    ],
)
def test_the_text_around(text, regex, around):
    found = text_around({"reply": text}, [Pattern("reply", regex)])
    assert (found["before"], found["match"], found["after"]) == around


def test_phrases_of_words_begin_and_end_with_words():
    phrases = {phrase for text in ("so. <a></a>!", "so much\nmore", "!!") for phrase in phrases_of(text)}
    assert {"<a></a>", "!!", "so much", "so"} <= phrases
    assert {". <a>", "</a>!", "much\nmore", "so."} & phrases == set()

"""The page of a trace: what it says and where it leads."""

import base64
import hashlib
import json
import re

import pytest

from flows.queries.messages import LONGEST
from tests.fixtures import builders
from tests.flows.viewer import looking
from tests.flows.viewer.hand_made import FORKED, RUN, HandMade, batch, forked, trained_fork, update
from tests.flows.viewer.looking import Elements, pluck

TOOLS = "e" * 32
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(3)'/>"


def image(kind, data):
    """A row of images."""
    digest = hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()
    return {"group_id": "g0", "digest": digest, "media_type": kind, "data": data, "trace_id": TOOLS, "message": 0}


TRACES = f"/runs/{RUN}/traces/"
IMAGES = [image("image/png", PNG), image("image/svg+xml", SVG), image("image/jpeg", SVG)]


def tools():
    """Messages with images, thoughts, calls of tools and their results; the last one is no JSON."""
    pictures = [
        {"type": "image_url", "image_url": {"url": f"stagecoach-image:sha256:{row['digest']}"}} for row in IMAGES
    ]
    away = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    calls = [{"id": "1", "name": "look", "arguments": "no JSON"}, {"id": "2", "name": "calc", "arguments": '{"x": 1}'}]
    bodies = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, *pictures, away, {"type": "odd"}]},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": "Look"} for name in "12"),
    ]
    rows = [
        builders.message(
            TOOLS, at, parent=at - 1 if at else None, role=body["role"], sampled=at == 1, content="Look",
            body=json.dumps(body),
        )
        for at, body in enumerate(bodies)
    ]  # fmt: skip
    return [*rows, builders.message(TOOLS, 4, parent=3, content="Look", body="{", sampled=True)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A store with a forked trace that was trained on, its mate, and a hostile one."""
    made = HandMade(tmp_path_factory.mktemp("pages") / "store")
    credits = trained_fork()
    rewards = json.dumps({"good": {"score": 0.5, "weight": 2.0}, "unscored": None})
    record = '{"agent": {"config": {"sampling": {"temperature": 0.5, "top_k": 20, "min_p": null, "seed": 3}}}}'
    traces = [
        builders.trace(
            FORKED, reward=1.0, record=record, rewards=rewards, episode_id="one", assignment_id="g0/0", num_branches=2
        ),
        builders.trace("mate", reward=0.0, episode_id="two", assignment_id="g0/1"),
        builders.trace("judge", reward=None, episode_id="one", assignment_id="g0/0", agent="judge"),
    ]
    measured = {"sample_id": f"{FORKED}/0", "logprobs": [0] * 4 + [-1.5, -2, 0, 0, 0], "entropies": [0] * 9}
    made.step(
        traces, forked(), credits, batches=[batch(credits[:1], scale=0.3)], updates=[update()],
        token_statistics=[measured],
    )  # fmt: skip
    made.step([builders.failed(TOOLS, example_id="tools")], tools(), step=1, images=IMAGES)
    return made.reader


def values(library, trace_id=FORKED, **query):
    return looking.values(library, TRACES + trace_id, **query)


def shown(library, **query):
    """The numbers of the messages that the page shows."""
    return pluck(values(library, **query)["messages"], "message")


def refused(library, address=TRACES + FORKED, **query):
    """What an address is answered that cannot be."""
    status, text = looking.answer(library, address, **query)
    assert status in (400, 404)
    return text


def test_the_top_says_what_became_of_it_and_leads_there(library):
    found = values(library)
    assert found["outcome"]["outcome"] == "trained"
    assert found["samples"][0]["address"] == f"/runs/{RUN}/steps/0/batch?row=0#row"
    assert pluck(found["samples"], "trained") == [True, False]
    assert found["policies"]["made"]["version"] == 0, "its training names no policy as input here"
    parts = [("good", 0.5, 2.0, 1.0), ("unscored", None, None, None)]
    assert pluck(found["reward_parts"], "name", "score", "weight", "product") == parts


def test_settings_of_sampling_beside_the_temperature_are_shown(library):
    assert values(library)["sampling"] == {"top_k": 20} and values(library, "mate")["sampling"] == {}
    assert "<dt>top_k</dt><dd>20</dd>" in looking.answer(library, TRACES + FORKED)[1]


def test_mates_and_episode_lead_to_their_traces(library):
    found = values(library)
    assert pluck(found["mates"], "trace_id") == [FORKED, "mate", "judge"]
    assert (found["previous"], found["next"], found["place"]) == (None, "mate", 0)
    judge = values(library, "judge")
    assert judge["trace"]["reward"] is None and judge["next"] is None


def test_branches_are_read_one_after_the_other_or_alone(library):
    whole = values(library)
    assert pluck(whole["messages"], "message", "follows") == [(0, None), (1, None), (2, None), (3, None), (4, 0)]
    assert pluck(whole["branches"], "branch") == [0, 1]
    assert shown(library, branch="1") == [0, 4] and values(library, branch="1")["branch"] == 1
    assert "branch=&#39;7&#39;" in refused(library, branch="7")


def test_a_window_a_jump_and_a_message_alone(library, monkeypatch):
    monkeypatch.setattr("flows.viewer.pages.trace.WINDOW", 2)
    assert shown(library) == [0, 1] and shown(library, to="trained") == [1, 2]
    assert shown(library, **{"from": "3"}) == shown(library, to="last") == [3, 4]
    (alone,) = values(library, message="3", at="1")["messages"]
    assert alone["message"] == 3 and alone["tokens"]["columns"]["token_id"] == [9]
    assert values(library, **{"from": "99"})["from"] == 4


def test_calls_and_the_messages_that_answer_them(library):
    messages = values(library, TOOLS)["messages"]
    assert pluck(messages[1]["calls"], "id") == ["1", "2"]
    assert pluck(messages, "answers") == [None, None, "1", "2", None]
    assert [call["arguments"]["text"] for call in messages[1]["calls"]] == ["no JSON", '{\n  "x": 1\n}']
    assert messages[1]["thoughts"]["text"] == "hm"


def test_only_images_of_safe_kinds_that_are_what_they_say_are_shown(library):
    parts = values(library, TOOLS)["messages"][0]["parts"]
    images = [part["image"] for part in parts if part["kind"] == "image"]
    assert images[0]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert pluck(images[1:], "url", "why") == [
        (None, "images of this type are not shown"),
        (None, "its bytes are no image of this type"),
        (None, "images of other addresses are not loaded"),
    ]
    html = looking.answer(library, TRACES + TOOLS)[1]
    assert [value for tag, name, value in Elements(html).values if (tag, name) == ("img", "src")] == [images[0]["url"]]


@pytest.mark.engine
def test_a_line_of_ten_megabytes_is_cut_and_whole_in_the_json(hand):
    line = "x" * 10_000_000 + "y"
    hand.step([builders.trace(TOOLS)], [builders.message(TOOLS, content=line, body="[]")])
    status, text = looking.answer(hand.reader, TRACES + TOOLS)
    assert status == 200 and len(text) < 100_000
    assert re.search("x{20000}", text) and not re.search("x{20001}", text)
    (part,) = values(hand.reader, TOOLS)["messages"][0]["parts"]
    assert part["text"]["text"] == line and part["text"]["left_out"] == len(line) - LONGEST


def test_the_colouring_of_the_address_is_the_one_that_is_drawn(library):
    assert [values(library, color=color)["color"] for color in ("ratio", "none")] == ["ratio", "none"]
    assert values(library)["color"] == "advantage" and values(library, TOOLS)["color"] == "engine"
    assert "is not known" in refused(library, color="purple")


def test_tokens_beyond_what_a_page_draws_are_told(library, monkeypatch):
    monkeypatch.setattr("flows.queries.tokens.DRAWN", 4)
    found = values(library)
    assert [each["tokens"]["left_out"] for each in found["messages"]] == [0, 2, 1, 2, 2]
    assert "message=1&amp;at=1" in looking.answer(library, TRACES + FORKED)[1]


def test_a_trace_is_found_without_its_run_and_an_unknown_one_refused_with_the_nearest(library):
    found = looking.values(library, "/traces/ffffffff")
    assert found["trace_id"] == FORKED and found["run"] == RUN
    assert "names no trace" in refused(library, "/traces/mote")
    assert "names no trace" in refused(library, TRACES + "mat")
    assert values(library, FORKED, key="f" * 32)["trace_id"] == FORKED, "a hint that is wrong is no error"

"""Replies that end in the middle, at the limit of tokens: how they come back in the next prompt, by kind of renderer.

The real renderer and verifiers' own graph, called as verifiers' client calls them, without an engine.
"""

import pyarrow as pa
import pytest

from storage.schemas.stage_tables import MESSAGES
from tasks.inference.engine import model_info
from tasks.inference.trace_rows.rows import message_rows, wire_record
from tasks.metrics.rollouts import retokenised_turns
from tests.fixtures.shapes import blank, messages

pytestmark = pytest.mark.engine

STOP, BROKEN = "<|im_end|>", "é"
ASKED = {"role": "user", "content": "hi"}
NEXT = {"user": {"role": "user", "content": "go"}, "tool": {"role": "tool", "tool_call_id": "c", "content": "7"}}
CUT = {"between words": "yes", "in a character": f"yes{BROKEN}", "in blanks": "yes \n", "in a thought": "<think>\nhm"}


@pytest.fixture(scope="module")
def model(models):
    return models["a"]


def sampled(tokenizer, text):
    """The tokens of a text; of a character that is cut, the first byte alone."""
    whole = text.removesuffix(BROKEN)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    return ids if whole == text else [*ids, tokenizer.encode(BROKEN, add_special_tokens=False)[0]]


def said(parsed):
    """A parsed reply as the harness sends it back."""
    reply = {"role": "assistant", "content": parsed.content or None}
    return reply | ({"reasoning_content": parsed.reasoning_content} if parsed.reasoning_content else {})


def two_turns(model, settings, completion, following):
    """The rows of a trace of two turns, of which the first reply is `completion`."""
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import Response, TurnTokens, Usage

    tokenizer = load_tokenizer(str(model))
    renderer = create_renderer(tokenizer, model_info.renderer_config("qwen3", str(model), settings))
    trace, history = blank(), [ASKED]
    for ids, added in ((sampled(tokenizer, completion), following), (sampled(tokenizer, f"ok{STOP}"), None)):
        turn = prepare_turn(trace, messages(history), [])
        before = turn.previous_renderer_token_ids()
        bridged = before and renderer.bridge_to_next_turn(*before, history[turn.tail_start :])
        prompt = bridged or renderer.render(history, add_generation_prompt=True)
        reply = said(renderer.parse_response(ids))
        tokens = TurnTokens(
            prompt_ids=prompt.token_ids,
            bridged=bool(bridged),
            completion_ids=ids,
            completion_logprobs=[-1.0] * len(ids),
            message_spans=turn.prompt_message_spans(prompt) if bridged else prompt.message_token_spans(),
            is_content=prompt.is_content,
        )
        used = Usage(prompt_tokens=len(prompt.token_ids), completion_tokens=len(ids))
        response = Response(
            id="r", created=0, model="m", message=messages([reply])[0], finish_reason=None, usage=used, tokens=tokens
        )
        turn.commit(response)
        history += [reply, added] if added else []
    return message_rows(wire_record(trace))


def branches(rows):
    """How many messages nothing follows."""
    return len(rows) - len({row["parent"] for row in rows} - {None})


@pytest.mark.parametrize("where", CUT)
@pytest.mark.parametrize(("settings", "following"), [({}, "tool"), ({"enable_thinking": False}, "user")], ids=str)
def test_what_is_continued_keeps_its_tokens(model, settings, following, where):
    rows = two_turns(model, settings, CUT[where], NEXT[following])
    assert [row["role"] for row in rows] == ["user", "assistant", following, "assistant"]
    assert branches(rows) == 1 and counted(rows) == {}
    stop = rows[3]["token_ids"][-1]
    assert stop not in rows[1]["token_ids"] and not rows[2]["mask"][0]
    assert stop in rows[2]["token_ids"][:2], "the end that is missing is added before the next message, and not trained"


@pytest.mark.parametrize(("where", "num_branches"), list(zip(CUT, [1, 2, 2, 2], strict=True)))
def test_what_is_rendered_anew_is_counted_where_its_text_has_other_tokens(model, where, num_branches):
    rows = two_turns(model, {}, CUT[where], NEXT["user"])
    assert branches(rows) == num_branches
    assert sum(counted(rows).values()) == num_branches - 1


def counted(rows):
    """What the counter of the metrics makes of these rows."""
    return retokenised_turns(pa.Table.from_pylist(rows, schema=MESSAGES.arrow))

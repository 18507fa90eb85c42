"""What members are told: templates judged before play, and user messages folded."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from sample_arena.errors import ArenaError
from sample_arena.folding import fold
from sample_arena.prompts import PromptPack
from sample_arena.schedule import Schedule, Slot, rounds

from tests.fixtures.commands import cases

TURNS = {("a", "talk"): "{{ claim }}: say {{ round }} of {{ num_rounds }}", ("b", "vote"): "vote"}
KNOWN = frozenset({"claim"})


def test_a_pack_fills_in_its_templates():
    pack = PromptPack(TURNS, {"a": "You hold {{ claim }}"}, {"b": "{# nobody reads this #}Q"}, names=KNOWN)
    values = {"claim": "{{ 7 }}", "round": 1, "num_rounds": 2}
    assert pack.rendered(pack.turns["a", "talk"], values) == "{{ 7 }}: say 1 of 2"
    assert (
        pack.rendered(pack.system["a"], values) == "You hold {{ 7 }}" and pack.rendered(pack.question["b"], {}) == "Q"
    )
    assert pack.rendered(pack.heard, {"member": "a", "phase": "talk", "public": "hi\n"}) == "a: hi\n"


@cases(__file__, "templates")
@pytest.mark.parametrize("kind", ["turns", "system", "question"])
def test_templates_hold_text_and_known_names_alone(template, told, kind):
    part = {("a", "talk"): template} if kind == "turns" else {"a": template}
    with pytest.raises(ArenaError, match=told):
        PromptPack(**{"turns": TURNS, "names": KNOWN, kind: part})


@pytest.mark.parametrize("name", ["round", "num_rounds", "phase"])
@pytest.mark.parametrize("kind", ["system", "question"])
def test_what_opens_a_conversation_may_not_change_from_turn_to_turn(kind, name):
    with pytest.raises(ArenaError, match=f"'{name}' changes from turn to turn"):
        PromptPack(**{"turns": TURNS, "names": KNOWN, kind: {"a": f"{{{{ {name} }}}}"}})


def test_every_turn_has_a_template():
    pack = PromptPack(TURNS, names=KNOWN)
    pack.require_complete("ab", Schedule((*rounds("talk", "a", 2), Slot("vote", ("b",)))))
    with pytest.raises(ArenaError, match=r"\('b', 'talk'\)"):
        pack.require_complete("ab", Schedule((Slot("talk", ("a", "b")), Slot("vote", ("b",)))))

    class Dynamic:
        def next_slot(self, state):
            return None

    pack.require_complete("ab", Dynamic())
    with pytest.raises(ArenaError, match=r"\['c'\]"):
        pack.require_complete("abc", Dynamic())


# Folding


class Typed(BaseModel):
    """A message of a library that allows more fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: Any


def user(content, **more):
    return {"role": "user", "content": content, **more}


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "c", "name": "find"}
IMAGE = user([{"type": "image_url", "image_url": {"url": "data:"}}])


NAMED = {"CALL": CALL, "RESULT": RESULT, "IMAGE": IMAGE}


def told(entry):
    """A message of a table of cases: a constant by its name, a text of the user, or fields of the user's message."""
    return user(**entry) if isinstance(entry, dict) else NAMED.get(entry, user(entry))


def folds(messages, folded):
    """Assert what messages are folded into, those of a library as well, and that they stay as they were."""
    before = [dict(message) for message in messages]
    assert fold(messages) == folded and messages == before
    typed = fold([Typed(**message) for message in messages])
    assert [message.model_dump() for message in typed] == folded and all(type(one) is Typed for one in typed)


@cases(__file__, "folded")
def test_user_texts_in_a_row_become_one(messages, folded):
    folds([told(entry) for entry in messages], [told(entry) for entry in folded])


MESSAGE = st.one_of(
    st.builds(user, st.sampled_from(("", "a", "b"))),
    st.builds(lambda text, name: user(text, name=name), st.sampled_from("ab"), st.sampled_from("xy")),
    st.sampled_from((CALL, RESULT, IMAGE)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGE, max_size=8))
def test_folding_twice_is_folding_once_and_loses_no_text(messages):
    once = fold(messages)
    assert fold(once) == once
    texts = [each["content"] for each in messages if isinstance(each["content"], str)]
    kept = [each["content"] for each in once if isinstance(each["content"], str)]
    assert "".join(texts).replace("\n\n", "") == "".join(kept).replace("\n\n", "")
    assert [each for each in once if each["role"] != "user"] == [each for each in messages if each["role"] != "user"]

"""ECHO: golden values of a conversation with tools, and any graph against a walk along its branches, token by token."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantage.algorithms.credit import AdvantageBreach
from tasks.advantage.stage import STAGE
from tasks.runtime.imports import NotImportable
from tests.fixtures.builders import message, trace, view
from tests.fixtures.stages import advantage, credited, group, tables_of

MASKS = "tests.fixtures.masks"
NO_ROLES = {"system": None, "user": None, "tool": None}
STREAMS = ("advantages", "rl_weights", "ref_kl_weights", "reward", "baseline", "advantage")


def call(*calls):
    return json.dumps({"role": "assistant", "tool_calls": [{"id": id, "name": name} for id, name in calls]})


def result(call_id, name=None):
    return json.dumps({"role": "tool", "tool_call_id": call_id, "name": name})


def observed(number, parent, tokens, role="tool", body="{}", content=None):
    """An environment's message: a token of the template, then its body, or those tokens that are content."""
    content = [False] + [True] * (len(tokens) - 1) if content is None else content
    return message("g0-0", number, parent=parent, tokens=tokens, role=role, body=body, is_content=content)


# The policy calls two tools, each answers, a user asks on, the policy answers; the first message is the task.
TALK = [
    observed(0, None, [1, 2], role="user"),
    message("g0-0", 1, parent=0, tokens=[3], sampled=True, body=call(("c1", "look"), ("c2", "add"))),
    observed(2, 1, [4, 5, 6], body=result("c1")),
    observed(3, 2, [7, 8], body=result("c2")),
    observed(4, 3, [9, 10], role="user"),
    message("g0-0", 5, parent=4, tokens=[11], sampled=True),
]


PAIR = group(1.0, 0.0)
OTHER = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
"""The second trace of the pair."""
BODIES = {4: 0.1, 5: 0.1, 7: 0.1}
"""What the bodies of both tools in TALK weigh, by place."""


def changed(number, **columns):
    """The talk with other columns in a message."""
    return [row | (columns if row["message"] == number else {}) for row in TALK]


def echoed(messages=TALK, traces=PAIR, **section):
    """The credits of one trace with these messages beside one whose reward is another."""
    return credited(traces, [*messages, *OTHER], **({"type": "echo"} | section))


def taught(messages=TALK, traces=PAIR, **section):
    """The places of the tokens of the first branch that are predicted, with their weights."""
    weights = echoed(messages, traces, **section)[0]["ce_weights"]
    return {place: round(weight, 6) for place, weight in enumerate(weights) if weight}


def test_tool_bodies_of_later_turns_by_hand():
    rows = echoed()
    #                                                       task     act  c1             c2        user     act
    assert rows[0]["ce_weights"] == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0.1, 0, 0, 0])
    assert rows[0]["rl_weights"] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert rows[0]["advantages"] == [0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.5]
    assert not any(rows[1]["ce_weights"])


def test_a_token_that_stands_for_an_image_is_not_learnt():
    record = json.dumps({"mm_token_type_id_map": {"5": 1}}, separators=(",", ":"))
    assert taught(traces=[row | {"record": record} for row in PAIR]) == {5: 0.1, 7: 0.1}
    assert taught(traces=[row | {"record": "{}"} for row in PAIR]) == BODIES


@pytest.mark.parametrize(("names", "places"), [(["add"], {7: 0.1}), (["other"], {}), ([], {})])
def test_tools_by_name(names, places):
    assert taught(tool={"tool_names": names}) == places


def test_a_result_may_name_its_tool_itself():
    assert taught(changed(2, body=result("c1", name="add")), tool={"tool_names": ["add"]}) == BODIES


def test_a_call_in_the_form_of_other_apis_names_its_tool_too():
    body = json.dumps({"tool_calls": [{"id": "c1", "function": {"name": "look"}}]})
    assert taught(changed(1, body=body), tool={"tool_names": ["look"]}) == {4: 0.1, 5: 0.1}


MALFORMED = [
    "[]",
    '{"tool_calls": null}',
    '{"tool_calls": ["look"]}',
    '{"tool_calls": [{"name": "look"}]}',
    '{"tool_calls": [{"id": "", "name": "look"}]}',
    '{"tool_calls": [{"id": "c1"}]}',
    '{"tool_calls": [{"id": "c1", "function": null}]}',
    '{"tool_calls": [{"id": "c1", "function": "look"}]}',
]


@pytest.mark.parametrize("body", MALFORMED)
@pytest.mark.parametrize("answer", [result("c1"), "{}", "[]", '{"tool_call_id": null}', '{"tool_call_id": ""}'])
def test_a_call_that_names_nothing_leaves_its_result_without_a_tool(body, answer):
    bodies = {1: {"body": body}, 2: {"body": answer}}
    rows = [row | bodies.get(row["message"], {}) for row in TALK]
    assert not taught(rows, tool={"tool_names": ["look"]})
    assert taught(rows)


def test_a_call_without_a_name_does_not_hide_one_that_has_it():
    body = '{"tool_calls": [{"id": "c1", "name": "look"}, {"id": "c1"}, 3]}'
    assert taught(changed(1, body=body), tool={"tool_names": ["look"]}) == {4: 0.1, 5: 0.1}


def test_a_message_without_attribution_has_no_token_of_it():
    assert taught(changed(2, is_content=[])) == {7: 0.1}


def test_no_token_of_a_sampled_message_is_predicted():
    late = {"role": "tool", "is_content": [True, True], "mask": [False, True]}
    assert taught([*TALK[:5], message("g0-0", 5, parent=4, tokens=[11, 12], sampled=True, **late)]) == BODIES


def test_a_rollout_without_a_reward_still_shows_what_its_tools_answered():
    traces = group(None, 0.0)
    assert taught(traces=traces) == BODIES and not any(echoed(traces=traces)[0]["rl_weights"])


def streams(rows):
    return [[row[name] for name in STREAMS] for row in rows]


@pytest.mark.parametrize("section", [{}, {"normalise_std": True}], ids=str)
def test_the_actions_are_credited_exactly_as_by_grpo(section):
    plain, rows = echoed(type="grpo", **section), echoed(**section)
    assert streams(rows) == streams(plain) and rows != plain
    assert echoed(**section, **NO_ROLES) == plain


BELOW = {"keep_mask": f"{MASKS}:below", "arguments": {"limit": 6}}


def test_a_keep_mask_narrows_the_choice():
    assert taught(**BELOW) == {4: 0.1}


def test_a_keep_mask_cannot_change_its_arguments():
    section = {"type": "echo", "keep_mask": f"{MASKS}:forgetful", "arguments": {"limits": [6]}}
    config, tables = view(STAGE, algorithm=section), tables_of(PAIR, [*TALK, *OTHER])
    first, again = (advantage(tables, config, step=1)["samples"].to_pylist() for _ in range(2))
    assert first == again and first[0]["ce_weights"] == pytest.approx([*[0] * 4, 0.1, *[0] * 6])


def test_a_keep_mask_of_other_code_than_the_config_was_resolved_with_is_refused():
    with pytest.raises(NotImportable, match="was resolved with sha256:other"):
        echoed(**BELOW, keep_mask_version="sha256:other")


def test_a_keep_mask_of_a_message_without_tokens_is_empty():
    assert taught([*TALK, observed(6, 5, [], content=[])], **BELOW) == {4: 0.1}


def test_a_keep_mask_of_nested_lists_is_refused():
    with pytest.raises(AdvantageBreach, match=f"keep_mask {MASKS}:wrong: it returned list, not lists of truth values"):
        echoed(keep_mask=f"{MASKS}:wrong", arguments={"kind": "nested"})


NAMES = ("look", "add")
IDS = ("c1", "c2")
ROLES = ("system", "user", "tool", "assistant")


@st.composite
def talks(draw):
    """Draw the messages of one trace: forks, roles, tools called and answering, tokens sampled or not or in part."""
    messages = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        length, role = draw(st.integers(0, 3)), draw(st.sampled_from(ROLES))
        sampled = draw(st.booleans())
        flags = st.lists(st.booleans(), min_size=length, max_size=length)
        calls = draw(st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(NAMES)), max_size=2))
        body = call(*calls) if role == "assistant" else result(draw(st.sampled_from(IDS)), draw(NAME))
        columns = {"role": role, "body": body, "is_content": draw(flags | st.just([]))}
        row = message("g0-0", number, parent=parent, tokens=[number] * length, sampled=sampled, **columns)
        messages.append(row | ({"mask": draw(flags)} if sampled else {}))
    return draw(st.permutations(messages))


NAME = st.none() | st.sampled_from(NAMES)
ALPHA = st.sampled_from([0.5, 0.25])
SECTION = st.none() | st.fixed_dictionaries({"alpha": ALPHA})
TOOL_NAMES = st.none() | st.lists(st.sampled_from(NAMES), max_size=2)
TOOL = st.none() | st.fixed_dictionaries({"alpha": ALPHA, "tool_names": TOOL_NAMES})


def slowly(rows, sections):
    """Return the ce weight of every token of each message, by walking up from it."""
    by_number = {row["message"]: row for row in rows}
    found = {}
    for number, row in by_number.items():
        above, parent = [], row["parent"]
        while parent is not None:
            above.append(by_number[parent])
            parent = by_number[parent]["parent"]
        section = sections.get(row["role"])
        wanted = section is not None and not row["sampled"] and any(each["sampled"] for each in above)
        if wanted and section.get("tool_names") is not None:
            wanted = _tool(row, above) in section["tool_names"]
        found[number] = [0.0] * len(row["token_ids"])
        for place, content in enumerate(row["is_content"]):
            if wanted and content and not row["mask"][place]:
                found[number][place] = section["alpha"]
    return found


def _tool(row, above):
    body = json.loads(row["body"])
    if body["name"]:
        return body["name"]
    for each in above:
        if each["role"] == "assistant":
            for called in reversed(json.loads(each["body"])["tool_calls"]):
                if called["id"] == body["tool_call_id"]:
                    return called["name"]
    return None


@settings(max_examples=60)
@given(talks(), SECTION, SECTION, TOOL)
def test_any_graph_is_weighed_as_a_walk_token_by_token_says(rows, system, user, tool):
    sections = {"system": system, "user": user, "tool": tool}
    credits = credited([trace("g0-0")], rows, type="echo", **sections)
    expected = slowly(rows, sections)
    seen = set()
    for row in credits:
        along = [0.0 if number in seen else weight for number in row["path"] for weight in expected[number]]
        seen |= set(row["path"])
        assert row["ce_weights"] == along
    assert streams(credits) == streams(credited([trace("g0-0")], rows, type="grpo"))

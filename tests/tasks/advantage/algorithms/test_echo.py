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
    """An environment's message: template, then body."""
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


def echoed(messages=TALK, **section):
    """The credits of one trace with these messages beside one whose reward is another."""
    rest = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
    return credited(PAIR, [*messages, *rest], type="echo", **section)


def weights(*values):
    return [pytest.approx(value) for value in values]


def test_tool_bodies_of_later_turns_by_hand():
    rows = echoed()
    #                                      task     act  c1             c2        user     act
    assert rows[0]["ce_weights"] == weights(0, 0, 0, 0, 0.1, 0.1, 0, 0.1, 0, 0, 0)
    assert rows[0]["rl_weights"] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert rows[0]["advantages"] == [0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.5]
    assert not any(rows[1]["ce_weights"])


def test_a_token_that_stands_for_an_image_is_not_learnt():
    seeing = [row | {"record": json.dumps({"mm_token_type_id_map": {"5": 1}}, separators=(",", ":"))} for row in PAIR]
    blind = [row | {"record": "{}"} for row in PAIR]
    rest = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
    one, other = (credited(traces, [*TALK, *rest], type="echo")[0]["ce_weights"] for traces in (seeing, blind))
    assert one == weights(0, 0, 0, 0, 0, 0.1, 0, 0.1, 0, 0, 0) and other[4] == pytest.approx(0.1)


def test_each_role_has_its_own_alpha_and_the_task_has_none():
    rows = echoed(user={"alpha": 0.5}, tool={"alpha": 2.0})
    assert rows[0]["ce_weights"] == weights(0, 0, 0, 0, 2, 2, 0, 2, 0, 0.5, 0)
    system = [row | {"role": "system"} if row["message"] == 4 else row for row in TALK]
    assert echoed(system, system={"alpha": 0.25}, tool=None)[0]["ce_weights"] == weights(*[0] * 9, 0.25, 0)


def test_tools_by_name():
    assert echoed(tool={"tool_names": ["add"]})[0]["ce_weights"] == weights(*[0] * 7, 0.1, 0, 0, 0)
    assert not any(echoed(tool={"tool_names": ["other"]})[0]["ce_weights"])
    assert not any(echoed(tool={"tool_names": []})[0]["ce_weights"])
    named = [row | {"body": result("c1", name="add")} if row["message"] == 2 else row for row in TALK]
    both = weights(0, 0, 0, 0, 0.1, 0.1, 0, 0.1, 0, 0, 0)
    assert echoed(named, tool={"tool_names": ["add"]})[0]["ce_weights"] == both


def test_a_call_in_the_form_of_other_apis_names_its_tool_too():
    body = json.dumps({"tool_calls": [{"id": "c1", "function": {"name": "look"}}]})
    other = [row | {"body": body} if row["message"] == 1 else row for row in TALK]
    found = echoed(other, tool={"tool_names": ["look"]})[0]["ce_weights"]
    assert found == weights(0, 0, 0, 0, 0.1, 0.1, 0, 0, 0, 0, 0)


def test_a_call_may_be_answered_after_others_were_made():
    later = [
        *TALK[:2],
        message("g0-0", 2, parent=1, tokens=[4], sampled=True, body=call(("c3", "wait"))),
        observed(3, 2, [5, 6], body=result("c1")),
    ]
    assert echoed(later, tool={"tool_names": ["look"]})[0]["ce_weights"] == weights(0, 0, 0, 0, 0, 0.1)


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
    changed = {1: {"body": body}, 2: {"body": answer}}
    rows = [row | changed.get(row["message"], {}) for row in TALK]
    assert not any(echoed(rows, tool={"tool_names": ["look"]})[0]["ce_weights"])
    assert any(echoed(rows)[0]["ce_weights"])


def test_a_call_without_a_name_does_not_hide_one_that_has_it():
    body = '{"tool_calls": [{"id": "c1", "name": "look"}, {"id": "c1"}, 3]}'
    rows = [row | {"body": body} if row["message"] == 1 else row for row in TALK]
    assert sum(echoed(rows, tool={"tool_names": ["look"]})[0]["ce_weights"]) == pytest.approx(0.2)


def test_ids_of_calls_belong_to_their_branch():
    fork = [
        TALK[0],
        message("g0-0", 1, parent=0, tokens=[3], sampled=True, body=call(("c1", "look"))),
        observed(2, 1, [4, 5], body=result("c1")),
        message("g0-0", 3, parent=0, tokens=[6], sampled=True, body=call(("c1", "add"))),
        observed(4, 3, [7, 8], body=result("c1")),
    ]
    rows = echoed(fork, tool={"tool_names": ["add"]})
    assert not any(rows[0]["ce_weights"])
    assert rows[1]["path"] == [0, 3, 4] and rows[1]["ce_weights"] == weights(0, 0, 0, 0, 0.1)


def test_a_message_without_attribution_has_no_token_of_it():
    unknown = [row | {"is_content": []} if row["message"] == 2 else row for row in TALK]
    assert echoed(unknown)[0]["ce_weights"] == weights(*[0] * 7, 0.1, 0, 0, 0)


def test_a_sampled_token_is_never_predicted_again():
    answer = TALK[1] | {"role": "tool", "is_content": [True]}
    late = message("g0-0", 5, parent=4, tokens=[11], sampled=True, role="tool", is_content=[True])
    rows = echoed([TALK[0], answer, *TALK[2:5], late])
    assert rows[0]["ce_weights"][2] == rows[0]["ce_weights"][10] == 0 and rows[0]["rl_weights"][10] == 1


def test_a_rollout_without_a_reward_still_shows_what_its_tools_answered():
    rest = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
    rows = credited(group(None, 0.0), [*TALK, *rest], type="echo")
    assert sum(rows[0]["ce_weights"]) == pytest.approx(0.3) and not any(rows[0]["rl_weights"])


@pytest.mark.parametrize("section", [{}, {"normalise_std": True}], ids=str)
def test_the_actions_are_credited_exactly_as_by_grpo(section):
    rest = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
    plain = credited(group(1.0, 0.0), [*TALK, *rest], type="grpo", **section)
    assert [[row[name] for name in STREAMS] for row in echoed(**section)] == [
        [row[name] for name in STREAMS] for row in plain
    ]
    assert echoed(**section) != plain
    assert echoed(**section, **NO_ROLES) == plain


def test_a_keep_mask_narrows_the_choice():
    found = echoed(keep_mask=f"{MASKS}:below", arguments={"limit": 6})[0]["ce_weights"]
    assert found == weights(0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0)


def test_a_keep_mask_cannot_change_its_arguments():
    section = {"type": "echo", "keep_mask": f"{MASKS}:forgetful", "arguments": {"limits": [6]}}
    rest = [message("g0-1", 0), message("g0-1", 1, parent=0, sampled=True)]
    config, tables = view(STAGE, algorithm=section), tables_of(group(1.0, 0.0), [*TALK, *rest])
    first, again = (advantage(tables, config, step=1)["samples"].to_pylist() for _ in range(2))
    assert first == again and first[0]["ce_weights"] == weights(*[0] * 4, 0.1, *[0] * 6)


def test_a_keep_mask_of_other_code_than_the_config_was_resolved_with_is_refused():
    with pytest.raises(NotImportable, match="was resolved with sha256:other"):
        echoed(keep_mask=f"{MASKS}:below", arguments={"limit": 6}, keep_mask_version="sha256:other")


def test_a_keep_mask_of_a_message_without_tokens_is_empty():
    silent = [*TALK, observed(6, 5, [], content=[])]
    found = echoed(silent, keep_mask=f"{MASKS}:below", arguments={"limit": 6})[0]["ce_weights"]
    assert found == weights(0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("too few", "it returned 7 lists for 8 messages"),
        ("too long", r"for message 0 of trace g0-0 it returned bool \(3,\), not 2 truth values"),
        ("numbers", "for message 0 of trace g0-0 it returned int64"),
        ("nested", "it returned list, not lists of truth values"),
        ("nothing", "it returned NoneType, not lists of truth values"),
    ],
)
def test_a_keep_mask_of_another_shape_is_refused(kind, message):
    with pytest.raises(AdvantageBreach, match=f"keep_mask {MASKS}:wrong: {message}"):
        echoed(keep_mask=f"{MASKS}:wrong", arguments={"kind": kind})


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
SECTION = st.none() | st.builds(lambda alpha: {"alpha": alpha}, st.sampled_from([0.5, 0.25]))
TOOL = st.none() | st.builds(
    lambda alpha, names: {"alpha": alpha, "tool_names": names},
    st.sampled_from([0.5, 0.25]),
    st.none() | st.lists(st.sampled_from(NAMES), max_size=2),
)


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


@settings(max_examples=30)
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
    plain = credited([trace("g0-0")], rows, type="grpo")
    assert [[row[name] for name in STREAMS] for row in credits] == [[row[name] for name in STREAMS] for row in plain]


def test_the_walk_tells_something():
    assert sum(sum(row) for row in slowly(TALK, {"tool": {"alpha": 0.5, "tool_names": ["look"]}}).values()) == 1.0

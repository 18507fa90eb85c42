"""Demonstrations as traces: whose they are is in their ids."""

import json

import pyarrow as pa
import pytest

from configs.run import RunConfig, View
from storage.store import open_store
from tasks.assignment import stage as assignment
from tasks.assignment.examples import read_demonstrations
from tasks.filtering import stage as filtering
from tasks.rollout import demonstration
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import perform
from tests.fixtures.builders import stage_of, table

EXAMPLES = [
    {"environment": "demonstrations", "example_id": str(number), "split": "train", "task": json.dumps({"messages": []})}
    for number in range(64)
]
LISTING = stage_of("examples", lambda tables, config: {"examples": table("examples", EXAMPLES)}, ("examples",))


def rendered(messages):
    """Return the rows of a question of one token and an answer of one token."""
    row = {"is_content": [True], "logprobs": [0.0], "content": "x", "body": "{}"}
    asked = row | {"message": 0, "parent": None, "role": "user", "sampled": False, "token_ids": [1], "mask": [False]}
    said = row | {"message": 1, "parent": 0, "role": "assistant", "sampled": True, "token_ids": [2], "mask": [True]}
    return [asked, said]


def shown(store, run, seed):
    """Assign and render the demonstrations of step 0 of a supervised run."""
    config = RunConfig.model_validate(
        {
            "kind": "sft",
            "seed": seed,
            "environments": ({"name": "demonstrations", "taskset": {"id": "demonstrations"}},),
            "assignment": {"groups_per_step": 4, "group_size": 1},
            "data": {"path": "demonstrations.jsonl"},
            "filtering": {"filters": [{"type": "errored"}]},
        }
    )
    context = RunContext(store, run, config, {})
    listed = perform(LISTING, context, 0)
    drawn = perform(assignment.task.stage, context, 0, (listed,))
    return context, perform(demonstration.STAGE, context, 0, (drawn, listed), services=Services(render=rendered))


def traces_of(context, ref):
    """Return the example of every trace."""
    found = context.table("traces", (ref,))
    return dict(zip(found["trace_id"].to_pylist(), found["example_id"].to_pylist(), strict=True))


def test_another_run_has_other_traces_unless_it_does_the_same_work(tmp_path):
    store, elsewhere = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    first, other = (traces_of(*shown(store, f"run-{seed}", seed)) for seed in (1, 2))
    assert len(first) == len(other) == 4 and set(first.values()) != set(other.values())
    assert not first.keys() & other.keys()
    assert traces_of(*shown(elsewhere, "again", 1)) == first, "equal inputs give equal ids"


def test_a_finding_about_one_run_takes_nothing_from_another(tmp_path):
    store = open_store(tmp_path / "store")
    (one, shown_one), (other, shown_other) = (shown(store, f"run-{seed}", seed) for seed in (1, 2))
    noted = store.quarantines.record(traces_of(one, shown_one), where="true", reason="wrong answers", run="run-1")
    reasons = store.quarantines.reasons([noted.quarantine])
    kept = [
        context.table("verdicts", (perform(filtering.STAGE, context, 0, (ref,), parameters=reasons),))[
            "keep"
        ].to_pylist()
        for context, ref in ((one, shown_one), (other, shown_other))
    ]
    assert kept == [[False] * 4, [True] * 4]


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_of_a_row_reach_the_renderer(tmp_path, form):
    tools = [{"type": "function", "function": {"name": "find", "description": "Find it."}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"messages": messages, "tools": form(tools)}) + "\n" + json.dumps({"messages": messages})
    )
    listed = read_demonstrations(file)
    assert [json.loads(task).get("tools") for task in listed["task"].to_pylist()] == [tools, None]
    seen = []

    def render(*given):
        seen.append(given)
        return rendered(given[0])

    names = listed["example_id"].to_pylist()
    assigned = [
        {"assignment_id": name, "group_id": name, "environment": "demonstrations", "example_id": name} for name in names
    ]
    config = View(RunConfig(), ("data", "model"), "demonstration")
    inputs = demonstration.DemonstrationInputs(pa.Table.from_pylist(assigned), listed, 0, "k" * 32, render)
    demonstration.demonstration(inputs, config)
    assert seen == [(messages, tools), (messages,)]
    assert json.dumps(seen[0][1]) == json.dumps(tools), "a template writes a schema in the order of its fields"


def test_texts_and_parts_may_stand_in_one_conversation(tmp_path):
    """As most files with pictures have it; a text becomes a part, and an empty one before a call none."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "two", "tool_calls": None}
    messages = [
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": [picture]},
        said,
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (messages, [messages[0], said])))
    shown, plain = (json.loads(task)["messages"] for task in read_demonstrations(file)["task"].to_pylist())
    found = [[{name: value for name, value in part.items() if value} for part in each["content"]] for each in shown]
    text = [{"type": "text", "text": "how many?"}], [{"type": "text", "text": "two"}]
    assert found == [text[0], [], [picture], text[1]] and shown[1]["tool_calls"] == calls
    assert plain[1]["content"][0]["text"] == "two"

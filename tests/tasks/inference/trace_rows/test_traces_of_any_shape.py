"""Traces of any shape go over the real wire into real tables and come back as they were, and train each token once."""

import asyncio
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storage.store import open_store
from tasks.arrays.message_graph import find_branches, owners
from tasks.inference.trace_rows.images import restore_images
from tasks.inference.trace_rows.rows import RolloutOrigin, rebuild, rows_of_record, trace_tables, wire_record
from tests.fixtures.shapes import NOTES, NUMBERS, SCRIPT, URLS, Player, blank, sent
from tests.fixtures.stages import credited

pytestmark = pytest.mark.engine

ASSIGNMENT = {"assignment_id": "g/0", "group_id": "g", "environment": "e", "example_id": "x"}
FEW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
REPLY = {"content": "I look.", "reasoning_content": None, "calls": [{"name": "look", "arguments": '{"at": "it"}'}]}

THINKS = REPLY | {"reasoning_content": "Hm."}
FORKED = [("asks", "what?", THINKS), ("answers", "that", REPLY), ("rewinds", "again?", REPLY),
          ("compacts", "on", REPLY), ("delegates", "you do it", REPLY)]  # fmt: skip
"""Every way in which a branch begins: reasoning dropped, a retry, a history told anew, a sub-agent."""


def play(scripts, changes):
    """The traces as the server has them, one for each script, and the episode as the client has it."""
    traces = [blank(f"seat{i}", picture=each.pop("picture", None)) for i, each in enumerate(changes)]
    turns = [partial(player.move, *move) for script, t in zip(scripts, traces, strict=True)
             for player in [Player(t)] for move in script]  # fmt: skip

    def finish():
        for trace, change in zip(traces, changes, strict=True):
            for name, value in change.items():
                setattr(trace, name, value)

    return traces, asyncio.run(sent(traces, [*turns, finish]))


def rows_of(episode):
    """The rows that sampling hands over for the episode."""
    made = [
        rows_of_record(wire_record(trace), RolloutOrigin(ASSIGNMENT, "p", 0, 0, 1.0), episode.id)
        for trace in episode.traces
    ]
    return trace_tables([row for row, _ in made], [message for _, own in made for message in own])


def stored(made):
    """The rows after a store has had them."""
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory))
        pieces = {name: store.append(name, rows, run="r", step=0, key="k", attempt="a") for name, rows in made.items()}
        return {name: store.read([piece]) for name, piece in pieces.items()}


def rebuilt(found):
    """The traces out of their rows."""
    whole = restore_images(found["traces"], found["messages"], found.get("images"))
    messages = whole["messages"].to_pylist()
    return [
        rebuild(row, [m for m in messages if m["trace_id"] == row["trace_id"]]) for row in whole["traces"].to_pylist()
    ]


def same(value, other):
    """Equality of JSON values in which NaN is itself."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


@FEW
@given(st.lists(SCRIPT, min_size=1, max_size=2), st.data())
def test_every_trace_comes_back_as_the_server_had_it(scripts, data):
    changes = [
        {"info": data.draw(NOTES), "metrics": {"m": data.draw(NUMBERS)}, "picture": data.draw(URLS)} for _ in scripts
    ]
    kept = [dict(change) for change in changes]
    traces, episode = play(scripts, changes)
    made = stored(rows_of(episode))
    columns = (made["messages"]["body"], made["traces"]["record"], made["traces"]["info"])
    bodies = "".join(text for column in columns for text in column.to_pylist())
    for row in made["images"].to_pylist() if "images" in made else []:
        assert f'"stagecoach-image:sha256:{row["digest"]}"' in bodies
    for before, after, change in zip(traces, rebuilt(made), kept, strict=True):
        assert same(after, wire_record(before))
        assert same(after["info"], change["info"]) and same(after["metrics"], change["metrics"])
        assert after["task"]["data"]["picture"] == change["picture"]


@FEW
@example(FORKED, FORKED[:1])
@given(SCRIPT, SCRIPT)
def test_every_sampled_token_is_trained_once(first, second):
    traces, episode = play([first, second], [{}, {}])
    made = rows_of(episode)
    messages = made["messages"].to_pylist()
    graph = find_branches(made["messages"], owners(made["messages"], made["traces"], "messages"))
    paths = [graph.path.values[a:b].tolist() for a, b in zip(graph.path.offsets, graph.path.offsets[1:], strict=False)]
    found = [[token for row in path for token in messages[row]["token_ids"]] for path in paths]
    assert found == [branch.token_ids for trace in traces for branch in trace.branches]

    rows = [
        row | {"reward": float(i), "error_class": None, "agent": "a", "episode_id": str(i)}
        for i, row in enumerate(made["traces"].to_pylist())
    ]
    credits = credited(rows, messages)
    for trace in traces:
        weights = [w for row in credits if row["trace_id"] == trace.id for w in row["rl_weights"]]
        assert sum(w != 0 for w in weights) == sum(sum(node.mask) for node in trace.nodes)


def test_attempts_that_verifiers_does_not_train_are_not_trained():
    from verifiers.v1.semantic import ParentLink

    trace = blank()
    player = Player(trace)

    def forget():
        player.history = player.history[:3]

    def link():
        turn, thrown_away, summary, after = (call.node for call in trace.calls)
        for child, parent, kind in ((thrown_away, turn, "compaction_attempt"), (summary, turn, "compaction_attempt"),
                                    (after, summary, "compaction")):  # fmt: skip
            trace.nodes[child].semantic_parents.append(ParentLink(node=parent, type=kind))

    turn, sums, again, on = (
        partial(player.move, kind, text, REPLY)
        for kind, text in (("asks", "what?"), ("asks", "Sum it up."), ("asks", "Once more."), ("compacts", "on"))
    )
    made = rows_of(asyncio.run(sent([trace], [turn, sums, forget, again, on, link])))
    (row,), messages = made["traces"].to_pylist(), made["messages"].to_pylist()
    trained = [branch.token_ids for branch in trace.branches if branch.trainable]
    assert len(trained) == 2 < len(trace.branches)
    others = [row | {"trace_id": "other", "reward": 0.0}], [one | {"trace_id": "other"} for one in messages]
    credits = credited([row | {"reward": 1.0}, *others[0]], [*messages, *others[1]])
    paths = [each["path"] for each in credits if each["trace_id"] == trace.id]
    assert [[token for n in path for token in messages[n]["token_ids"]] for path in paths] == trained
    assert same(rebuilt(stored(made))[0], wire_record(trace)), "the record has the attempt and its links"


def sizes(num_turns):
    """Nodes, tokens and characters of the rows of a trace of `num_turns`, and tokens of all its whole prompts."""
    trace = blank()
    player = Player(trace)
    for _ in range(num_turns):
        player.move("answers", "what the tool said", REPLY)
    made = rows_of(asyncio.run(sent([trace], [lambda: None])))
    texts = [*made["traces"]["record"].to_pylist(), *made["messages"]["body"].to_pylist()]
    tokens = sum(len(ids) for ids in made["messages"]["token_ids"].to_pylist())
    return made["messages"].num_rows, tokens, sum(map(len, texts)), player.num_prompt_tokens


def test_rows_grow_by_the_turn_and_not_with_those_before():
    counted = [sizes(turns) for turns in (4, 8, 12, 16)]
    nodes, tokens, characters, naive = (
        [b - a for a, b in itertools.pairwise(one)] for one in zip(*counted, strict=True)
    )
    assert nodes == [8, 8, 8]
    assert len(set(tokens)) == 1
    assert max(characters) - min(characters) < 200, "but for the digits of larger numbers"
    assert naive[0] < naive[1] < naive[2], "whole prompts for each turn would grow ever faster"
    assert counted[-1][3] > 6 * counted[-1][1]

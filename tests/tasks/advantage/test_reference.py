"""The reference stage with a teacher that is played: what is scored, once each, on which path, and what is refused."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.advantage import reference as stage
from tasks.advantage.reference import SAFE, STAGE
from tasks.inference.engine.client import EngineLost, NotScorable
from tasks.runtime.stage import Policy
from tests.fixtures.builders import environments, exchange, message, table, trace, verdict, view
from tests.fixtures.parts import between_groups, in_slices, step
from tests.fixtures.pictures import PAD, conversation, sees
from tests.fixtures.stages import reference, tables_of, written

TEACHER = {"type": "opd", "teacher": {"path": "/teacher", "max_in_flight": 3}}


def logprob(sequence, place):
    """What the played teacher gives a token: it depends on all tokens up to it, and on their order."""
    value = 0
    for token in sequence[: place + 1]:
        value = (31 * value + token + 1) % 997
    return -1.0 - value / 64


class Played:
    """Services and a teacher in this process; `losses` is after how many sequences each of its lives ends."""

    def __init__(self, losses=()):
        self.losses = list(losses)
        self.asked = []
        self.most = set()
        self.lives = 0
        self.served = []
        """Of each call the key or the path of who was served."""
        self.pins = []
        """The policies that may not be replaced now."""
        self.pinned_at_calls = []

    def serve(self, who):
        self.lives += 1
        return SimpleNamespace(player=self, salt=who.key if isinstance(who, Policy) else who.path)

    @contextmanager
    def pinned(self, policy):
        assert isinstance(policy, Policy), "a policy that nobody knows cannot be kept in the engine"
        self.pins.append(policy)
        yield
        self.pins.remove(policy)

    def score(self, served, sequences, most):
        self.most.add(most)
        self.served.append(served.salt)
        self.pinned_at_calls.append([*self.pins])
        left = self.losses.pop(0) if self.losses else len(sequences)
        for place in reversed(range(len(sequences))):  # in no order that one could rely on
            if not left:
                raise EngineLost("the teacher died")
            left -= 1
            tokens = list(sequences[place])
            self.asked.append(tokens)
            yield place, [0.0, *(logprob(tokens, index) for index in range(1, len(tokens)))]


@pytest.fixture(autouse=True, scope="module")
def calls_are_played():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "score", lambda served, *call: served.player.score(served, *call))
        yield


def references(tables, played, policy=None, **sections):
    """Return the references of some tables, in parts where the messages are."""
    config = view(STAGE, **({"algorithm": TEACHER, "engine": {"max_model_len": 64}} | sections))
    return reference(tables, config, policy=policy, engine=played, teachers=played)["references"]


def scored(messages, traces, played, **sections):
    """Return the references of some traces, all of which are kept, by trace and message."""
    rows = references(tables_of(traces, messages), played, **sections).to_pylist()
    return {(row["trace_id"], row["message"]): row["logprobs"] for row in rows}


def test_sampled_tokens_are_scored_after_all_before_them_and_others_are_zero():
    played = Played()
    messages = [*exchange("t0", (1, 2), (3, 4)), message("t0", 2, parent=1, tokens=(5,))]
    found = scored(messages, [trace("t0")], played)
    path = [1, 2, 3, 4]
    assert found == {("t0", 1): [logprob(path, 2), logprob(path, 3)]}
    assert played.asked == [path], "what comes after the last sampled token needs no scoring"
    assert played.most == {3}


def test_a_branch_of_which_all_was_scored_is_not_asked_about():
    played = Played()
    messages = [*exchange("t0", (1, 2), (3, 4)), message("t0", 2, parent=1), message("t0", 3, parent=1)]
    scored(messages, [trace("t0")], played)
    assert played.asked == [[1, 2, 3, 4]] and played.served == ["/teacher"]


def test_the_policy_that_scores_is_pinned_and_shown_what_goes_before(monkeypatch):
    class Shown:
        """A demonstration of two tokens, the second the length of what it goes before."""

        def __init__(self, settings, model):
            assert (settings.type, model.vocab_size) == ("opsd", 99)

        def prepend(self, row, tokens):
            return [int(row["trace_id"][1:]), len(tokens), *tokens]

    monkeypatch.setattr(stage, "DemonstrationPrompt", Shown)
    played, policy = Played(), Policy("key", 0)
    tables = tables_of(
        [trace("t5"), trace("t6")], [*exchange("t5", (1,), (2,)), *exchange("t6", (1, 2, 3, 8, 9), (4, 5))]
    )

    def made(longest):
        sections = {"algorithm": {"type": "opsd"}, "engine": {"max_model_len": longest}, "model": {"vocab_size": 99}}
        return references(tables, played, policy, **sections).to_pylist()

    rows, paths = made(9), [[5, 2, 1, 2], [6, 7, 1, 2, 3, 8, 9, 4, 5]]
    assert sorted(played.asked) == paths, "as long as the engine takes, and no longer"
    assert [row["logprobs"] for row in rows] == [
        [np.float32(logprob(paths[0], 3))],
        [np.float32(logprob(paths[1], place)) for place in (7, 8)],
    ]
    assert played.pinned_at_calls == [[policy]] and played.pins == [] and played.served == ["key"]
    with pytest.raises(NotScorable, match=r"trace t6 of environment reverse has 9 tokens to be scored"):
        made(8)


@pytest.mark.parametrize(("traces", "verdicts"), [([], []), ([trace("t0")], [verdict("t0", reason="truncated")])])
def test_where_nothing_is_kept_nothing_is_scored(traces, verdicts):
    played = Played()
    assert references(tables_of(traces, verdicts=verdicts), played).num_rows == 0
    assert played.asked == []


def test_only_kept_traces_of_environments_with_a_scorer_are_scored():
    traces = [trace("t0", environment="own"), trace("t1", environment="other"), trace("t2", environment="own")]
    tables = tables_of(traces, verdicts=[verdict("t0"), verdict("t1"), verdict("t2", reason="truncated")])
    sections = {"algorithm": {"type": "grpo"}, "environments": environments(own={"algorithm": TEACHER})}
    assert references(tables, Played(), **sections)["trace_id"].to_pylist() == ["t0"]


def test_what_a_lost_teacher_had_not_scored_is_asked_of_the_next():
    messages = [each for name in ("t0", "t1", "t2") for each in exchange(name, (1, 2), (len(name), int(name[1])))]
    traces = [trace(name) for name in ("t0", "t1", "t2")]
    whole, broken = Played(), Played(losses=[1, 0])
    assert scored(messages, traces, broken) == scored(messages, traces, whole)
    assert (whole.lives, broken.lives) == (1, 3)
    assert len(broken.asked) == 3, "what was scored is not asked again"


@pytest.mark.parametrize(
    ("messages", "columns", "sections", "refusal"),
    [
        (
            exchange("t0"),
            {"temperature": 0.7},
            {},
            r"sampled at 0\.7.*Sample at rollout\.temperature=1, or choose an algorithm without a reference$",
        ),
        (
            exchange("t0", range(7), (8, 9)),
            {},
            {"engine": {"max_model_len": 8}},
            r"has 9 tokens to be scored.*engine\.max_model_len is 8",
        ),
        ([message("t0", 0, sampled=True)], {}, {}, r"^trace t0 of environment reverse begins with a sampled token"),
        (exchange("t0"), {}, {"algorithm": {"type": "opsd"}}, "no policy of the store sampled these"),
    ],
    ids=["temperature", "long path", "sampled beginning", "unknown policy"],
)
def test_what_cannot_be_scored_is_refused(messages, columns, sections, refusal):
    played = Played()
    with pytest.raises(NotScorable, match=refusal):
        scored(messages, [trace("t0", **columns)], played, **sections)
    assert played.asked == []


def test_a_missing_demonstration_is_said_with_environment_and_example():
    tables = tables_of([trace("t0", example_id="e9", info=json.dumps({"answer": ""}))])
    with pytest.raises(NotScorable, match=r"environment reverse, example e9 \(trace t0\).*'answer'"):
        references(tables, Played(), Policy("key", 0), algorithm={"type": "opsd"})


NODE = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=4)
GRAPH = st.lists(st.tuples(NODE, st.integers(0, 6)), min_size=1, max_size=7)


@given(groups=st.lists(st.integers(0, 5), min_size=1, max_size=20), borders=st.lists(st.floats(0, 1), max_size=6))
def test_a_batch_is_scored_the_same_in_parts(groups, borders):
    traces, messages = step(sorted(groups), seed=len(groups))
    rows = list(enumerate(traces.to_pylist()))
    reasons = [("errored" if row["error_class"] else None, "truncated")[number % 3 == 0] for number, row in rows]
    judged = [verdict(row["trace_id"], reason=reason) for (_, row), reason in zip(rows, reasons, strict=True)]
    tables = {"traces": traces, "messages": messages, "verdicts": table("verdicts", judged)}
    parts = tables | {"messages": in_slices(messages, between_groups(traces, messages, borders))}
    played = [Played(), Played()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.arrays.group_parts.group_parts.__defaults__", (300, None))
        whole, in_parts = (
            written({"references": references(*each)})["references"]
            for each in zip((tables, parts), played, strict=True)
        )
    assert in_parts.equals(whole.combine_chunks())
    assert sorted(played[1].asked) == sorted(played[0].asked)


def test_a_part_that_cannot_be_scored_is_refused_before_the_first_is_scored(monkeypatch):
    played = Played()
    monkeypatch.setattr("tasks.arrays.group_parts.group_parts.__defaults__", (1, None))
    traces = [trace("t0", group_id="g0"), trace("t1", group_id="g1")]
    tables = tables_of(traces, [*exchange("t0"), *exchange("t1", range(7), (8, 9))])
    tables["messages"] = in_slices(tables["messages"], [0.5])
    with pytest.raises(NotScorable, match="trace t1 of environment reverse has 9 tokens"):
        list(references(tables, played, engine={"max_model_len": 8}))
    assert played.asked == []


def test_images_are_not_scored():
    rows = [*exchange("a"), *conversation("b", ["x"], [1, PAD, PAD]), *conversation("c", ["y"], [PAD])]
    refusal = (
        "table messages: 2 messages of kept traces show images, first of trace b; a reference reads text alone. "
        f"{SAFE}. Choose an algorithm without a reference"
    )
    with pytest.raises(NotScorable) as refused:
        scored(rows, [trace("a"), sees("b"), sees("c")], Played(), algorithm=TEACHER)
    assert str(refused.value) == refusal


@given(st.lists(GRAPH, min_size=1, max_size=3))
def test_a_loop_over_branches_scores_the_same(graphs):
    messages, expected = [], {}
    for number, graph in enumerate(graphs):
        name = f"t{number}"
        parents = [None if not node else (above % node) for node, (_, above) in enumerate(graph)]
        nodes = [[(token, sampled and node > 0) for token, sampled in values] for node, (values, _) in enumerate(graph)]
        nodes[0] = [(1, False), *nodes[0]]
        for node, values in enumerate(nodes):
            columns = {"tokens": [token for token, _ in values], "mask": [flag for _, flag in values]}
            row = message(name, node, parent=parents[node], **columns)
            messages.append(row | {"sampled": any(columns["mask"])})
        expected |= slowly(name, parents, nodes)
    found = scored(messages, [trace(f"t{number}") for number in range(len(graphs))], Played())
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == [float(np.float32(each)) for each in values]


def slowly(name, parents, nodes):
    """Score each token of each message with sampled tokens, after everything above it."""
    found = {}
    for node, values in enumerate(nodes):
        above = []
        place = parents[node]
        while place is not None:
            above = [token for token, _ in nodes[place]] + above
            place = parents[place]
        if any(flag for _, flag in values):
            whole = above + [token for token, _ in values]
            found[name, node] = [
                logprob(whole, len(above) + index) if flag else 0.0 for index, (_, flag) in enumerate(values)
            ]
    return found

"""Stages over a real store: keys, hits, adoption, commits, parts, what errors say, and the services they are handed."""

import errno
import time
from dataclasses import fields, replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from configs.run import RunConfig
from storage.errors import NoSpace, StoreError
from storage.schemas.stage_tables import EXAMPLES
from storage.store import open_store
from storage.turns import CachedTurn, TurnCache
from tasks.assignment import examples
from tasks.exchange.trace_import import ImportInputs
from tasks.runtime import parts as parts_module
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import MOST_LOSSES, perform, retry_lost
from tasks.stage_tasks import TASKS
from tests.fixtures import builders
from tests.fixtures.faults import happened
from tests.fixtures.waiting import PATIENCE

VERSIONS = {"stagecoach": "0"}


def examples_table(*names):
    rows = [{"environment": "e", "example_id": name, "split": "train", "task": "{}"} for name in names]
    return pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)


class Counting:
    """A stage function that counts its calls."""

    def __init__(self, *names):
        self.calls = 0
        self.names = names

    def __call__(self, tables, config):
        """Make the examples."""
        self.calls += 1
        return {"examples": examples_table(*(*self.names, f"group {config.assignment.group_size}"))}


def stage_of(function, name="made", version=1, **changes):
    settings = {"writes": ("examples",), "sections": ("assignment",), **changes}
    return replace(builders.stage_of(name, function, **settings), version=version)


def context_of(root, run="a", **changes):
    return RunContext(open_store(root), run, RunConfig(name=run, **changes), VERSIONS)


def test_the_second_time_nothing_is_computed(tmp_path):
    function = Counting("x", "y")
    first = perform(stage_of(function), context_of(tmp_path), 0)
    again = perform(stage_of(function), context_of(tmp_path), 0)
    assert (first.computed, again.computed, function.calls) == (True, False, 1)
    assert first.key == again.key
    assert again.rows == (("examples", 3),)
    assert context_of(tmp_path).table("examples", (again,))["example_id"].to_pylist() == ["x", "y", "group 16"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"assignment": {"group_size": 4}}, False),
        ({"assignment": {"groups_per_step": 1}}, False),
        ({"rollout": {"max_tokens": 7}}, True),
        ({"steps": 3, "store": "elsewhere"}, True),
    ],
)
def test_the_key_follows_the_declared_sections_only(tmp_path, change, same):
    stage = stage_of(Counting())
    assert (context_of(tmp_path).key(stage, 0, {}) == context_of(tmp_path, **change).key(stage, 0, {})) is same


def test_step_version_name_and_inputs_are_in_the_key(tmp_path):
    context, function = context_of(tmp_path), Counting()
    keys = {
        context.key(stage_of(function), 0, {}),
        context.key(stage_of(function), 1, {}),
        context.key(stage_of(function, version=2), 0, {}),
        context.key(stage_of(function, name="other"), 0, {}),
        context.key(stage_of(function), 0, {"examples": "k"}),
        context.key(stage_of(function), 0, {"policy": "k"}),
    }
    assert len(keys) == 6


def test_another_run_adopts_the_work_and_keeps_its_origin(tmp_path):
    function = Counting("x")
    made = perform(stage_of(function), context_of(tmp_path, "a"), 0)
    taken = perform(stage_of(function), context_of(tmp_path, "b"), 0)
    assert function.calls == 1 and taken.key == made.key and not taken.computed
    (entry,) = open_store(tmp_path).ledger.entries(run="b")
    assert [piece.run for piece in entry.outputs] == ["a"]


def test_a_section_that_is_not_declared_cannot_be_read(tmp_path):
    def peeks(tables, config):
        return {"examples": examples_table(str(config.rollout.max_tokens))}

    with pytest.raises(AttributeError, match="'rollout', which it does not declare"):
        perform(stage_of(peeks), context_of(tmp_path), 0)


def test_an_error_says_where_and_leaves_nothing(tmp_path):
    def fails(tables, config):
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason") as caught:
        perform(stage_of(fails, name="breaking"), context_of(tmp_path), 3)
    assert "Run a, step 3, stage breaking. Nothing of this attempt is visible" in caught.value.__notes__[0]
    assert open_store(tmp_path).ledger.entries() == []


def test_inputs_are_read_from_the_work_that_made_them(tmp_path):
    def renames(tables, config):
        assert list(tables) == ["examples"]
        return {"examples": examples_table(*(name + "!" for name in tables["examples"]["example_id"].to_pylist()))}

    context = context_of(tmp_path)
    made = perform(stage_of(Counting("x")), context, 0)
    after = perform(stage_of(renames, name="after", reads=("examples",)), context, 0, (made,))
    assert context.table("examples", (after,))["example_id"].to_pylist() == ["x!", "group 16!"]
    entry = context.find(after.key)
    assert entry is not None and entry.inputs == {"made": made.key}


def parts_stage(fail_after=None):
    """A stage that makes four pieces, one after the other; it may fail after some of them."""
    made = []

    def works(tables, config, *, parts):
        for number, name in enumerate(sorted({"p", "q", "r", "s"} - parts.finished_units())):
            if number == fail_after:
                raise ValueError("interrupted")
            made.append(name)
            parts.put({"examples": examples_table(name)})
        return {}

    return stage_of(works, name="long", unit=("examples", "example_id")), made


def test_finished_parts_survive_a_failure_and_are_not_made_again(tmp_path):
    failing, before = parts_stage(fail_after=2)
    with pytest.raises(ValueError, match="interrupted"):
        perform(failing, context_of(tmp_path), 0)
    assert before == ["p", "q"]
    store = open_store(tmp_path)
    assert [entry.part != "" for entry in store.ledger.entries()] == [True] * len(store.ledger.entries())
    whole, after = parts_stage()
    context = context_of(tmp_path)
    ref = perform(whole, context, 0)
    assert after == ["r", "s"]
    assert sorted(context.table("examples", (ref,))["example_id"].to_pylist()) == ["p", "q", "r", "s"]


def test_turns_go_when_their_groups_are_committed_also_those_of_a_process_that_died(tmp_path):
    turns = [CachedTurn(name, f"{name}/0", "r", "{}", ()) for name in ("p", "q", "r", "s", "other")]
    failing, _ = parts_stage(fail_after=2)
    whole, _ = parts_stage()

    def context():
        return context_of(tmp_path, rollout={"keep_turns": True})

    def left(kept):
        assert kept
        return [turn.group_id for turn in turns if kept.of(turn.group_id)]

    first = context()
    with pytest.raises(ValueError, match="interrupted"), first.queue_commits():
        assert first.turns
        for turn in turns[:3]:
            first.turns.put(turn)
        kept = first.turns
        perform(failing, first, 0)
    assert left(kept) == ["r"]
    # As if it had died between the commit of a group and that.
    again = context()
    with again.queue_commits():
        assert again.turns
        for turn in turns:
            again.turns.put(turn)
        perform(whole, again, 0)
        assert left(again.turns) == ["other"]
    assert again.turns is None and left(TurnCache(open_store(tmp_path), "a")) == []


@pytest.mark.fault(
    "disk",
    "a stage meets a disk that takes nothing",
    "one message with the place, or the error as it is",
)
@pytest.mark.parametrize(
    ("error", "expected", "where"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/weights/x"), NoSpace, "/weights/x"),
        (ValueError("the learner failed (OSError: No space left on device)"), NoSpace, ""),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), NoSpace, ""),
        (OSError(errno.EROFS, "Read-only file system", "/weights/x"), StoreError, "/weights/x"),
        (OSError(errno.EIO, "Input/output error"), OSError, None),
    ],
)
def test_a_disk_that_takes_nothing_is_named_whoever_in_a_stage_noticed(tmp_path, error, expected, where):
    def works(tables, config):
        raise error

    with pytest.raises(expected) as raised:
        perform(stage_of(works), context_of(tmp_path), 0)
    assert any("all earlier stages are safe" in note for note in raised.value.__notes__)
    happened(repr(error))
    if where is None:
        assert raised.value is error
    else:
        assert isinstance(raised.value, StoreError) and raised.value.__cause__ is error
        assert raised.value.where == (where or str(tmp_path)) and "then run the same again" in raised.value.do


def test_parts_of_one_attempt_are_known_before_they_are_committed(tmp_path):
    def works(tables, config, *, parts):
        parts.put({"examples": examples_table("p")})
        assert parts.finished_units() == {"p"}
        return {}

    ref = perform(stage_of(works, unit=("examples", "example_id")), context_of(tmp_path), 0)
    assert ref.num_rows("examples") == 1


def test_groups_that_end_close_together_share_a_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "LINGER_SECONDS", PATIENCE)  # at the end of the stage nobody waits any more
    stage, made = parts_stage()
    perform(stage, context_of(tmp_path), 0)
    assert len(made) == 4 and num_parts(tmp_path) == 1


def test_a_part_that_cannot_be_written_fails_the_stage(tmp_path):
    def works(tables, config, *, parts):
        parts.put({"examples": examples_table("p").drop_columns(["task"])})
        return {}

    with pytest.raises(ValueError, match="task"):
        perform(stage_of(works, unit=("examples", "example_id")), context_of(tmp_path), 0)
    assert open_store(tmp_path).ledger.entries() == []


def num_parts(root):
    """Return how many parts of work the ledger names."""
    return sum(bool(entry.part) for entry in open_store(root).ledger.entries())


def test_groups_that_two_attempts_committed_count_once(tmp_path):
    """Two attempts that overlapped both committed q; whoever goes on keeps one of the two."""
    for run, names in (("a", ("p", "q")), ("b", ("q", "r"))):

        def works(tables, config, *, parts, names=names):
            for name in names:
                known = num_parts(tmp_path)
                parts.put({"examples": examples_table(name)})
                while num_parts(tmp_path) == known:  # each is committed as a part of its own
                    time.sleep(0.02)
            raise ValueError("interrupted")

        stage = stage_of(works, name="long", unit=("examples", "example_id"))
        context = context_of(tmp_path, run)
        with pytest.raises(ValueError, match="interrupted"):
            perform(stage, context, 0)
    assert len(open_store(tmp_path).ledger.parts(context.key(stage, 0, {}))) == 4
    whole, made = parts_stage()
    ref = perform(whole, context_of(tmp_path), 0)
    assert sorted(context_of(tmp_path).table("examples", (ref,))["example_id"].to_pylist()) == ["p", "q", "r", "s"]
    assert made == ["s"]


def test_two_runs_that_finish_the_same_work_go_on_with_the_same_rows(tmp_path):
    contexts = [context_of(tmp_path, run) for run in ("a", "b")]

    def works(tables, config):
        if len(rivals) < 1:  # while this one computes, the other starts and finishes
            rivals.append(perform(stage_of(lambda *_: {"examples": examples_table("of b")}), contexts[1], 0))
        return {"examples": examples_table("of a")}

    rivals = []
    mine = perform(stage_of(works), contexts[0], 0)
    rows = [context.table("examples", (ref,)) for context, ref in zip(contexts, (mine, rivals[0]), strict=True)]
    assert mine.key == rivals[0].key
    assert rows[0]["example_id"].to_pylist() == rows[1]["example_id"].to_pylist() == ["of b"]


STAGES = list(dict.fromkeys(task.stage for tasks in TASKS.values() for task in tasks))


PARAMETERS = {"demonstration_examples": "rows.jsonl"}


class Reads:
    """Stands in for an attempt, or its services; remembers what the inputs of a stage take of them."""

    def __init__(self):
        self.tables = set()
        self.taken = set()

    def read(self, table):
        self.tables.add(table)
        return SimpleNamespace(table=lambda columns=None: None)

    def __getattr__(self, name):
        self.taken.add(name)
        return name


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.function.__name__)
def test_inputs_take_what_the_stage_declares(stage):
    reads, services = Reads(), Reads()
    names = ("rows", "table", "optional_rows", "optional_table")
    vars(reads).update(
        dict.fromkeys(names, reads.read),
        services=services,
        inputs={},
        parameters=PARAMETERS.get(stage.function.__name__),
        stage=stage,
        refs=(),
        context=SimpleNamespace(store=SimpleNamespace(answers=None), run="a"),
    )
    inputs = stage.read_inputs(reads)
    assert services.taken == {*stage.services} <= {field.name for field in fields(Services)}
    assert reads.tables <= {*stage.reads, *stage.optional}
    assert {*stage.reads} <= reads.tables or isinstance(inputs, ImportInputs)  # which has them for its key alone
    assert ("parts" in reads.taken) is stage.in_parts


def test_every_service_is_asked_by_a_stage():
    assert {name for stage in STAGES for name in stage.services} == {field.name for field in fields(Services)}


def test_a_service_that_is_missing_is_refused(tmp_path):
    context = RunContext(open_store(tmp_path), "a", RunConfig(name="a"), {})
    with pytest.raises(AssertionError, match="the run lacks a service that the stage declares"):
        perform(examples.STAGE, context, 0)


@pytest.mark.parametrize("losses", [0, MOST_LOSSES])
def test_a_lost_service_is_asked_again(losses):
    left = [ConnectionError] * losses

    def attempt():
        if left:
            raise left.pop()
        return "done"

    assert retry_lost(attempt, ConnectionError) == "done"


def test_a_service_that_is_lost_too_often_and_another_error_end_it():
    tried = []

    def attempt():
        tried.append(1)
        raise ConnectionError(str(len(tried)))

    with pytest.raises(ConnectionError, match=f"^{MOST_LOSSES + 1}$"):
        retry_lost(attempt, ConnectionError)
    tried.clear()
    with pytest.raises(ConnectionError, match=r"^1$"):
        retry_lost(attempt, TimeoutError)

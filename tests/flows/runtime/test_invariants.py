"""Every invariant of a step with a fault planted: the run stops there, and one message says where and what is safe.

The stages, the adapter and the store are the real ones; what is planted stands in for the stage before. That a real
engine's faults look like those of the stand-in here is shown in tests/tasks/inference/engine/test_engine.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest

from configs.run import RunConfig
from flows.cli import explanation
from flows.runtime.executor import StepBatch, check_account
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from storage.read.groups import open_groups
from storage.store import open_store
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.filtering.stage import STAGE as FILTERING
from tasks.inference.engine.checks import EngineMismatch
from tasks.inference.engine.client import EngineState
from tasks.learner.rows import BatchReader
from tasks.packing.stage import STAGE as PACKING
from tasks.rollout.stage import STAGE as ROLLOUT
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Policy, perform
from tasks.training.stage import STAGE as TRAINING
from tests.fixtures.builders import example, exchange, failed, stage_of, table, trace
from tests.fixtures.histories import policy_row
from tests.fixtures.stages import written

TRACES = [trace("a"), trace("b", reward=0.0), failed("c")]
STEP = 4
CONFIG = RunConfig.model_validate(
    {
        "name": "faulty",
        "seed": 7,
        "model": {"vocab_size": 512},
        "engine": {"url": "http://127.0.0.1:9", "dtype": "float32"},
    }
)


def assignment(row):
    given = {name: row[name] for name in ("assignment_id", "group_id", "environment", "example_id")}
    return {**given, "member": 0, "seed": 1}


def with_first(column, value):
    """Return a change that puts `value` into the first row of a column."""

    def change(rows):
        first, *others = rows.to_pylist()
        return pa.Table.from_pylist([first | {column: value}, *others], rows.schema)

    return change


class Step:
    """A step of a run in a real store; `changes` are made to the rows of a table before they are handed over."""

    def __init__(self, root, changes):
        self.context = RunContext(open_store(root), "faulty", CONFIG, {})
        self.changes = changes

    def changed(self, tables):
        return {name: self.changes.get(name, lambda same: same)(rows) for name, rows in tables.items()}

    def planted(self, name, refs=(), **rows):
        """Write rows as if a stage of that name had made them, changed where the test says so."""
        tables = {key: table(key, value) for key, value in rows.items()}
        return perform(stage_of(name, lambda *_: self.changed(tables), tuple(rows)), self.context, STEP, refs)

    def or_changed(self, stage, refs):
        """Run a real stage, with a change to its output where the test says so."""

        def function(inputs, config):
            return self.changed(written(stage.function(inputs, config)))

        return perform(replace(stage, function=function), self.context, STEP, refs)

    def draw(self):
        """Go from assignments to batches."""
        messages = [row for one in TRACES for row in exchange(one["trace_id"])]
        assigned = self.planted("assignment", assignments=[assignment(row) for row in TRACES])
        traces = self.planted("rollout", (assigned,), traces=TRACES, messages=messages)
        verdicts = self.or_changed(FILTERING, (traces,))
        credits = self.or_changed(ADVANTAGE, (traces, verdicts))
        return StepBatch((assigned,), (traces,), verdicts, credits, self.or_changed(PACKING, (credits, traces)))

    def account(self, drawn):
        check_account(self.context, drawn)

    def train(self, drawn):
        """Hand the batches to a learner that takes them apart like the real one, and has no weights."""
        learner = SimpleNamespace(train=lambda batch, **_: BatchReader(open_groups(batch.store), batch).plan())
        service = SimpleNamespace(restore=lambda policy: learner, turn=nullcontext, state_directory="")
        return perform(TRAINING, self.context, STEP, (drawn.packing,), Policy("p", STEP), Services(learner=service))

    def finished(self):
        """The stages that the ledger knows as finished, read by someone else."""
        return [entry.stage for entry in open_store(self.context.store.root.address).ledger.entries()]


def message_of(act, words=".", error=ValueError):
    """Return what the command line prints where an error with these words ends `act`."""
    with pytest.raises(error, match=words) as caught:
        act()
    message = explanation(caught.value)
    assert message is not None, f"{caught.value!r} would be a traceback"
    return message


def test_a_step_without_a_fault_is_not_stopped(tmp_path):
    step = Step(tmp_path, {})
    step.account(step.draw())
    assert step.finished() == ["assignment", "rollout", "filtering", "advantage", "packing"]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("logprobs", [0.0, 0.0], "'logprobs' has 2 values where 'token_ids' has 3"),
        ("mask", [False] * 4, "'mask' has 4 values where 'token_ids' has 3"),
        ("is_content", [True], "'is_content' has 1 values where 'token_ids' has 3"),
        ("logprobs", [0.0, 0.5, 0.0], "holds 0.5 at position 1: a log-prob above zero"),
        ("logprobs", [0.0, 0.0, float("nan")], "holds nan at position 2: not finite"),
        ("logprobs", [float("-inf"), 0.0, 0.0], "holds -inf at position 0: not finite"),
        ("mask", [True, False, False], "although 'sampled' is false"),
    ],
)
def test_per_token_arrays(tmp_path, column, value, words):
    step = Step(tmp_path, {"messages": with_first(column, value)})
    message = message_of(step.draw, words)
    assert f"run 'faulty', step {STEP}, table 'messages'" in message
    assert f"column '{column}', row {{'trace_id': 'a', 'message': 0}}" in message
    assert f"Run faulty, step {STEP}, stage rollout. Nothing of this attempt is visible" in message
    assert step.finished() == ["assignment"]


def keep_all(rows):
    return table("verdicts", [row | {"keep": True, "reason": None} for row in rows.to_pylist()])


def test_an_errored_row_in_a_baseline(tmp_path):
    step = Step(tmp_path, {"verdicts": keep_all})
    message = message_of(step.draw, "errored trace c is kept and would enter a baseline")
    assert "table verdicts, column keep" in message
    assert "all that was sampled is safe" in message
    assert f"Run faulty, step {STEP}, stage advantage." in message
    assert step.finished() == ["assignment", "rollout", "filtering"]


def twice(rows):
    """The rows and, under the next row number, the first one again."""
    again = rows.slice(0, 1).to_pylist()[0] | {"row": rows.num_rows}
    return pa.concat_tables([rows, table("batches", [again])])


@pytest.mark.parametrize(
    ("changes", "words", "column"),
    [
        ({"batches": twice}, "table batches, column sample_ids: sample ./0 is there 2 times", "sample_ids"),
        (
            {"traces": lambda rows: rows.slice(0, 2), "messages": lambda rows: rows.slice(0, 4)},
            "1 assignments left no trace, first g0/c",
            "assignment_id",
        ),
        ({"assignments": lambda rows: rows.slice(1)}, "g0/a was never assigned", "assignment_id"),
    ],
    ids=["a sample in two rows", "an assignment without a trace", "a trace that nobody assigned"],
)
def test_rollouts_that_are_lost_or_there_twice(tmp_path, changes, words, column):
    step = Step(tmp_path, changes)
    message = message_of(partial(step.account, step.draw()), words)
    assert f"column {column}" in message
    assert "The rows stay as they are" in message
    assert f"Run faulty, step {STEP}, between the stages packing and training." in message


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("rl_tokens", 5, r"rl_tokens says \[5\], but 4 tokens have rl weight"),
        ("ce_tokens", 1, r"ce_tokens says \[1\], but 0 tokens have ce weight"),
    ],
)
def test_denominators_that_do_not_match(tmp_path, column, value, words):
    step = Step(tmp_path, {"batches": with_first(column, value)})
    message = message_of(partial(step.train, step.draw()), words, Exception)
    assert "batches" in message
    assert f"Run faulty, step {STEP}, stage training. Nothing of this attempt is visible" in message
    assert "training" not in step.finished()


class LyingEngine:
    """An engine that says that it holds what it was told to, and answers with the log-probs that a test gives it."""

    fresh = cached = -1.0
    holds = ""

    def __init__(self, url, key, model="policy"):
        self.url = url

    def close(self): ...

    def healthy(self):
        return True

    def is_sleeping(self):
        return False

    def is_paused(self):
        return False

    def state(self):
        return EngineState(LyingEngine.holds, LyingEngine.holds, [], False)

    def serve(self, policy_key, directory, base=None, **_):
        LyingEngine.holds = policy_key

    def weights_sum(self, directory):
        """What an engine of others answers, which knows no checksum."""

    def probes(self, token_ids, policy_key):
        return LyingEngine.cached, [0.0, *[LyingEngine.fresh] * (len(token_ids) - 1)]


@pytest.fixture
def engine(monkeypatch):
    """An engine of others: it outlives the run, as one of our own would not."""
    monkeypatch.setattr("flows.services.engine.Engine", LyingEngine)
    monkeypatch.setattr("flows.services.engine.engine_command", lambda *_, **__: ([], {}))
    monkeypatch.setattr(LyingEngine, "holds", "")
    return LyingEngine


def sample_with(engine, root):
    """Come to the rollout of a step with an engine; its environments answer nothing that could be sampled."""
    step = Step(root, {})
    probe = {"probe_token_ids": [1, 2, 3], "probe_logprobs": [0.0, -1.0, -1.0]}

    def imported(tables, config, *, key, directory):
        (directory / "model.safetensors").write_bytes(b"weights")
        (row,) = policy_row(key, 0, None, False).to_pylist()
        return {"policies": table("policies", [row | probe])}

    policy = perform(stage_of("policy_import", imported, ("policies",)), step.context, 0)
    assigned = step.planted("assignment", assignments=[assignment(TRACES[0])])
    listed = step.planted("examples", examples=[example()])
    with Supervisor("faulty", root / "logs") as supervisor:
        services = Services(
            engine=InferenceService(supervisor, step.context, root),
            environments=SimpleNamespace(addresses=lambda names: {}, sharing=lambda alone: nullcontext()),
            teachers=SimpleNamespace(serve=None),  # nobody asks for one
            graders=SimpleNamespace(),
        )
        perform(ROLLOUT, step.context, STEP, (assigned, listed), Policy(policy.key, 0), services)
    return step


@pytest.mark.parametrize(
    ("fresh", "cached", "cause"),
    [
        (-1.7, -1.7, "it holds other weights: a reload that kept old ones, or an output head that was not reloaded"),
        (float("nan"), -1.0, "it holds other weights"),
        (-1.0, -1.7, "the weights are right and the prefix cache holds states of other weights"),
    ],
    ids=["old weights or head", "not a number", "stale prefix cache"],
)
def test_an_engine_that_does_not_hold_what_it_says(root, engine, monkeypatch, fresh, cached, cause):
    monkeypatch.setattr(engine, "fresh", fresh)
    monkeypatch.setattr(engine, "cached", cached)
    for attempt in ("the first", "resumed, when the engine already says that it holds the policy"):
        message = message_of(partial(sample_with, engine, root), error=EngineMismatch)
        assert cause in message, attempt
        assert "Nothing was sampled with it. Restart the engine and run again" in message
        assert f"Run faulty, step {STEP}, stage rollout. Nothing of this attempt is visible" in message
    assert sorted(entry.stage for entry in open_store(root).ledger.entries()) == [
        "assignment",
        "examples",
        "policy_import",
    ]


@pytest.mark.engine
def test_an_honest_engine_gets_to_sample(root, engine):
    """The way there is not what stops: with honest log-probs the stage goes on to look for its environments."""
    with pytest.raises(Exception) as caught:
        sample_with(engine, root)
    assert not isinstance(caught.value, EngineMismatch)
    assert engine.holds

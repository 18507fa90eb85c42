"""The wiring: which stage is fed by which, with which policy, in which order; and what a walk foretells."""

import gc
import threading
import weakref

import pytest

from configs.checks.run import problems
from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.orchestration.states import EmptyBatch, RunCancelled
from flows.runtime import loop
from flows.runtime.executor import RolloutSource
from flows.runtime.loop import plan_work
from flows.runtime.resolve_run import Source
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref
from tasks.training import stage as training
from tests.fixtures.builders import stand_in
from tests.fixtures.rehearsal import STAND_INS, Rehearsal, session_for, trained
from tests.fixtures.waiting import PATIENCE, until

SOURCE = Source("weights", "w" * 8)
MEASURED = ("assignment", "rollout", "filtering", "advantage", "packing", "training")


def config(**changes):
    environment = EnvironmentConfig(name="e", taskset={"id": "e"})
    return RunConfig.model_validate({"name": "r", "environments": (environment,), "steps": 2, "seed": 1, **changes})


class Recorder:
    """Does nothing but write down what it was asked, and names work after it."""

    def __init__(self, empty_batches=0, **changes):
        self.config = config(**changes)
        self.asked = []
        self.empty = empty_batches
        self._lock = threading.Lock()

    def __call__(self, task, step, refs=(), policy=None, **_):
        name = task.stage.name
        self.before(name, step)
        with self._lock:
            self.asked.append((name, step, tuple(ref.stage for ref in refs), policy.key if policy else None))
            rows = 1
            if name == "packing" and self.empty:
                self.empty, rows = self.empty - 1, 0
        self.after(name, step)
        return Ref(name, step, f"{name}{step}", tuple((table, rows) for table in task.stage.writes), 0, 0.0, True)

    def do_nothing(self, *_):
        """A dry run has no rows, engine or services."""

    check_account = abort = context_of = before = after = do_nothing

    def num_rows(self, table, ref):
        return 0

    def rows(self, table, ref):
        raise AssertionError(f"nothing is sampled, so nobody reads {table}")

    @property
    def stages(self):
        return [(name, step) for name, step, _, _ in self.asked]

    @property
    def policies(self):
        """The policy that samples each step."""
        return {step: policy for name, step, _, policy in self.asked if name == "rollout"}


def go(do, **prefetching):
    """Go through the steps of a run; return them."""
    return list(loop.train_steps(do, SOURCE, **prefetching))


def test_every_stage_is_fed_by_the_right_work_and_policy():
    do = Recorder()
    finished = go(do)
    expected = [("policy_import", 0, (), None), ("examples", 0, (), None)]
    for step, policy in enumerate(("policy_import0", "training0")):
        expected += [
            ("assignment", step, ("examples",), None),
            ("rollout", step, ("assignment", "examples"), policy),
            ("filtering", step, ("rollout",), None),
            ("advantage", step, ("rollout", "filtering"), None),
            ("packing", step, ("advantage", "rollout"), None),
            ("training", step, ("packing",), policy),
            ("metrics", step, MEASURED, None),
        ]
    assert do.asked == expected
    assert [each.policy for each in finished] == [Policy("training0", 1), Policy("training1", 2)]


LAG_1 = {"steps": 3, "rollout": {"max_off_policy_steps": 1}}


def test_one_step_off_policy_draws_the_next_step_while_this_one_trains():
    do, inline, sampled = Recorder(**LAG_1), Recorder(**LAG_1), threading.Event()

    def before(name, step):
        if (name, step) == ("training", 0):
            assert sampled.wait(PATIENCE), "nothing is sampled while a step trains"

    def after(name, step):
        if (name, step) == ("rollout", 1):
            sampled.set()

    do.before, do.after = before, after
    go(do, prefetch=True)
    assert do.policies == {0: "policy_import0", 1: "policy_import0", 2: "training0"}
    go(inline)
    assert sorted(map(str, do.asked)) == sorted(map(str, inline.asked))


def test_the_next_batch_is_built_when_the_one_before_is_packed():
    do = Recorder(**LAG_1)
    assert len(go(do, prefetch=True)) == 3
    assert do.stages.index(("packing", 1)) < do.stages.index(("assignment", 2))


@pytest.mark.parametrize(("lag", "prefetch"), [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)])
def test_a_run_holds_no_batch_of_earlier_steps(lag, prefetch):
    batches = {}
    gc.freeze()  # else each collection takes half a second for all modules
    try:
        for finished in loop.train_steps(Recorder(steps=9, rollout={"max_off_policy_steps": lag}), SOURCE, prefetch):
            batches[finished.step] = weakref.ref(finished.batch)
            gc.collect()
            assert [step for step, batch in batches.items() if batch()] == [finished.step]
    finally:
        gc.unfreeze()


def test_an_error_of_a_batch_that_is_built_ahead_ends_the_run():
    do, ended = Recorder(**LAG_1), []

    def empty_from_step_1(_, step):
        do.empty = step

    do.before, do.abort = empty_from_step_1, lambda: ended.append(1)
    with pytest.raises(EmptyBatch, match="step 1: 3 batches"):
        go(do, prefetch=True)
    assert ended == [1]


@pytest.mark.parametrize("lag", [1, 2])
def test_a_step_that_is_trained_is_reported_before_an_error_of_what_comes_after_it(monkeypatch, lag):
    add = RolloutSource.add

    def refuse(rollouts, steps, policy):
        if policy.version == 1:
            raise RunCancelled("somebody has cancelled")
        add(rollouts, steps, policy)

    monkeypatch.setattr(RolloutSource, "add", refuse)
    steps = loop.train_steps(Recorder(steps=5, rollout={"max_off_policy_steps": lag}), SOURCE)
    assert next(steps).policy == Policy("training0", 1)
    with pytest.raises(RunCancelled):
        next(steps)


@pytest.mark.parametrize(("empty", "batches"), [(0, 1), (1, 2), (2, 3)])
def test_an_empty_batch_is_drawn_again(empty, batches):
    do = Recorder(empty, steps=1)
    go(do)
    assert do.stages.count(("rollout", 0)) == batches
    assert do.stages.count(("training", 0)) == 1


def test_three_empty_batches_end_the_run_before_training():
    do = Recorder(3, steps=1)
    with pytest.raises(EmptyBatch, match=r"step 0: 3 batches in a row hold nothing to train on"):
        go(do)
    assert ("training", 0) not in do.stages
    assert do.asked[-1] == ("metrics", 0, MEASURED[:-1], None), "what there is of the last batch"


def test_what_is_drawn_is_checked_before_training_spends_anything():
    do = Recorder()

    def refuse(batch):
        raise ValueError(f"step {batch.packing.step} does not add up")

    do.check_account = refuse
    with pytest.raises(ValueError, match="step 0 does not add up"):
        go(do)
    assert ("training", 0) not in do.stages


def test_a_supervised_run_has_demonstrations_in_place_of_rollouts():
    do = Recorder(kind="sft", steps=1)
    list(loop.train_steps(do, Source("weights", "w", "file", "f")))
    names = [name for name, _ in do.stages]
    assert "rollout" not in names and names.count("demonstration") == 1


def foretold(root, **changes):
    context = RunContext(open_store(root), "r", config(**changes), {})
    return plan_work(context, SOURCE)


AFTER_ROLLOUTS = ["filtering", "advantage", "packing", "training", "metrics"]
RLOO_OF_ENVIRONMENT = {"name": "e", "taskset": {"id": "e"}, "algorithm": {"type": "rloo"}}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"algorithm": {"type": "grpo", "normalise_std": True}}, "advantage"),
        ({"environments": (RLOO_OF_ENVIRONMENT,)}, "advantage"),
        ({"packing": {"tokens_per_row": 4096}}, "packing"),
        ({"training": {"learning_rate": 1e-3}}, "training"),
        ({"filtering": {"filters": ({"type": "errored"},)}}, "filtering"),
        ({"filtering": {"max_batch_attempts": 2}, "evaluation": {"pass_at": (1,)}}, ""),
        ({"store": "elsewhere", "learner": {"threads": 2}}, ""),
    ],
)
def test_a_change_reaches_its_descendants_and_nothing_else(tmp_path, change, first):
    pairs = zip(foretold(tmp_path), foretold(tmp_path, **change), strict=True)
    differ = [one.stage for one, other in pairs if one.step == other.step == 0 and one.key != other.key]
    assert differ == (AFTER_ROLLOUTS[AFTER_ROLLOUTS.index(first) :] if first else [])


STREAM = {"steps": 5, "rollout": {"max_off_policy_steps": 2}}


def test_a_step_is_keyed_by_the_oldest_policy_that_may_sample_for_it():
    do = Recorder(**STREAM)
    go(do)
    oldest = "policy_import0"
    assert do.policies == {0: oldest, 1: oldest, 2: oldest, 3: "training0", 4: "training1"}
    assert [step for name, step in do.stages if name == "training"] == [*range(5)]
    # Nothing is assigned before a policy is there that may sample it.
    assert do.stages.index(("assignment", 3)) > do.stages.index(("training", 0))


def test_a_stream_refuses_rollouts_that_the_policy_scores():
    stream, one = (config(rollout={"max_off_policy_steps": lag}, algorithm={"type": "opsd"}) for lag in (2, 1))
    assert [line for line in problems(stream) if line.startswith("rollout.max_off_policy") and "scored" in line]
    assert not [line for line in problems(one) if line.startswith("rollout.max_off_policy")]


def test_how_policies_are_made_is_in_the_key_and_the_length_of_the_run_is_not(tmp_path):
    def keys(**changes):
        planned = foretold(tmp_path, **(STREAM | changes))
        return {ref.step: ref.key for ref in planned if ref.stage == "rollout"}

    base = keys()
    assert keys(steps=7).items() >= base.items()
    assert keys(evaluation={"pass_at": (1,)}) == base
    for change in ({"training": {"learning_rate": 1e-3}}, {"algorithm": {"type": "rloo"}}):
        assert not {*keys(**change).values()} & {*base.values()}
    assert keys(rollout={"max_off_policy_steps": 3})[0] != base[0]


def test_a_stage_that_asked_a_service_is_durable_soon(root, monkeypatch):
    learner = stand_in(training.STAGE, trained, writes=("updates",), services=("learner",))
    monkeypatch.setitem(STAND_INS, "training", learner)
    session, committed = session_for(root, "a"), open_store(root).ledger
    with session.context.queue_commits(600):
        next(loop.train_steps(Rehearsal(session), session.source))
        until(lambda: committed.entries(stage="training"), lambda: "the training waits")

"""Evaluations of whole runs: which policies on which examples, beside the next step, made again, compared, found."""

import signal
import threading

import pytest

from flows.cli.run_report import describe
from flows.runtime.loop import evaluation_configs, loop_train, plan_work
from flows.runtime.session import record_run
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.assignment.examples import FieldMissing
from tasks.inference.sampling.model_requests import sampling_of
from tests.fixtures.evaluations import Sampler, evaluate, played, train
from tests.fixtures.fixed import ENVIRONMENT
from tests.fixtures.histories import results
from tests.fixtures.rehearsal import SOURCE, session_for
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine  # whole runs: about a second each
TRIED = {"num_examples": 4, "attempts": 2, "every": 1}
OVERLAP_SECONDS = 0.3
"""Longer than a run takes from a policy to the sampling with it."""


def averages(outcome):
    return [
        (each["set"], each["version"], round(score["average"], 3))
        for each in outcome["evaluations"]
        for score in each["scores"]
    ]


def versions(outcome):
    return [each["version"] for each in outcome["evaluations"]]


def is_recorded(session):
    """Tell whether a run has nothing left to compute."""
    return not any(ref.computed for ref in plan_work(session.context, SOURCE))


@pytest.mark.parametrize("lag", [0, 1])
def test_every_policy_is_evaluated_in_order_beside_the_next_step(root, lag):
    sampler = Sampler()
    settings = {"evaluation": TRIED, "steps": 3, "rollout": {"max_off_policy_steps": lag}}
    session, outcome = train(root, "run", sampler, **settings)
    assert sampler.evaluated == [0, 1, 2, 3] and sampler.threads == {"evaluation"}
    assert versions(outcome) == [0, 1, 2, 3]
    (found,) = [each for each in outcome["comparisons"] if each["figure"] == "avg"]
    assert found["versions"] == [0, 3] and found["num_examples"] == 4 and found["difference"] == pytest.approx(0.3)
    assert is_recorded(session)


def test_a_run_goes_on_while_a_policy_is_evaluated(root):
    sampler = Sampler()
    sampler.gate = threading.Event()

    def open_gate(event, facts):
        """Let evaluations end as soon as the run has drawn its last step, which it could not, did it wait for them."""
        if event == "step" and facts["step"] == 1:
            sampler.gate.set()

    session = session_for(root, "run", evaluation=TRIED)
    session.watchers = (open_gate,)
    with played(sampler):
        assert len(loop_train(session)["evaluations"]) == 3


@pytest.mark.parametrize("lag", [0, 1])
def test_without_overlap_no_step_samples_during_an_evaluation(root, lag):
    evaluating, begun, overlaps = threading.Event(), threading.Event(), []

    class Slow(Sampler):
        """Gives the run time to sample the next step during each evaluation."""

        def __call__(self, tables, config, *, step, policy):
            is_evaluation = tables["assignments"]["group_id"][0].as_py().startswith("eval-")
            if is_evaluation:
                evaluating.set()
                begun.clear()
                begun.wait(OVERLAP_SECONDS)
            else:
                overlaps.append(evaluating.is_set())
                begun.set()
            rows = super().__call__(tables, config, step=step, policy=policy)
            if is_evaluation:
                evaluating.clear()
            return rows

    sampler, lagging = Slow(), {"max_off_policy_steps": lag}
    train(root, "run", sampler, evaluation=TRIED | {"overlap": False}, rollout=lagging)
    assert overlaps == [False, False]
    assert sampler.evaluated == [0, 1, 2]


def test_an_evaluation_that_fails_fails_the_run_and_its_steps_are_safe(root):
    class Broken(Sampler):
        def _trace(self, row, policy):
            if policy.version == 1:
                raise ValueError("the evaluation is broken")
            return super()._trace(row, policy)

    with pytest.raises(ValueError, match="the evaluation is broken") as caught:
        train(root, "run", Broken(), evaluation=TRIED)
    assert "stage rollout" in "".join(caught.value.__notes__)
    store = open_store(root)
    assert store.runs.events("run")[-1].event == "failed"
    assert results(store, "training", "run"), "the step under way was finished"
    sampler = Sampler()
    _, outcome = train(root, "run", sampler, evaluation=TRIED)
    assert 0 not in sampler.evaluated and versions(outcome) == [0, 1, 2]


def test_sets_have_examples_intervals_and_starts_of_their_own(root):
    sets = (
        {"name": "hard", "where": {"tier": [2]}, "num_examples": 2, "attempts": 1, "every": 2},
        {"name": "all", "every": 1, "at_start": False},
    )
    session, outcome = train(root, "run", Sampler(), evaluation=TRIED | {"sets": sets})
    shown = describe(session.context.store, "run", session.config)
    assert shown["evaluations"] == outcome["evaluations"], "by the settings that the ledger has of each"
    assert shown["comparisons"] == outcome["comparisons"]
    assert [each["set"] for each in shown["comparisons"] if each["figure"] == "avg"] == ["hard", "all"]
    assert averages(outcome)[0] == ("hard", 0, 0.135), "the two of tier 2 are held-2 and held-5"
    order = [("hard", 0), ("all", 1), ("hard", 2), ("all", 2)]
    assert [(name, version) for name, version, _ in averages(outcome)] == order


def test_a_set_is_the_same_work_in_any_run_whatever_it_is_called(root):
    own = {"num_examples": 2, "attempts": 1, "where": {"tier": [0]}}
    evaluate(root, "one", Sampler(), evaluation={"sets": ({"name": "a", **own}, {"name": "b", "num_examples": 3})})
    sampler = Sampler()
    session, outcome = evaluate(root, "two", sampler, evaluation=own | {"pass_at": (1,)})
    assert sampler.evaluated == [] and session.num_computed == 0
    assert outcome["sets"][0]["scores"][0]["num_examples"] == 2


@pytest.mark.essential
def test_an_environment_that_is_only_evaluated_on_changes_no_work_of_others(root):
    held_out = TRIED | {"environments": (ENVIRONMENT,)}
    alone, _ = train(root, "alone", Sampler(), evaluation=held_out)
    own = {"name": "own", "taskset": {"id": "own"}, "num_examples": 99, "attempts": 3, "every": 2, "at_start": False}
    sampler = Sampler()
    both = held_out | {"environments": (ENVIRONMENT, own)}
    session, outcome = train(root, "run", sampler, evaluation=both)
    assert sampler.evaluated == [2] and session.num_computed == 3, "its examples, what is tried of them, the rollouts"
    assert session.num_found >= alone.num_computed and is_recorded(session)
    (scores,) = [entry for entry in outcome["evaluations"] if entry["set"] == "own"]
    (score,) = scores["scores"]
    assert (score["environment"], score["num_examples"], score["num_attempts"]) == ("own", 6, 18), "all that there are"
    assert describe(session.context.store, "run", session.config)["evaluations"] == outcome["evaluations"]
    repeated = Sampler()
    train(root, "other", repeated, evaluation=held_out | {"environments": (own,)})
    assert repeated.evaluated == [], "the same work in a run that evaluates nothing else"


@pytest.mark.essential
def test_errors_are_made_again_once_and_the_replacement_counts(root):
    name = "eval-reverse_text-1/0"
    settings = {"num_examples": 3, "attempts": 2, "pass_at": (1, 2)}
    _, first = evaluate(root, "run", Sampler(frozenset({name})), evaluation=settings)
    (score,) = first["scores"]
    assert score["errors"] == {"infrastructure": 1} and score["num_attempts"] == 6
    assert [each["num_examples"] for each in score["pass_at"]] == [3, 2], "its sibling counts without it"
    sampler = Sampler()
    session, again = evaluate(root, "run", sampler, evaluation=settings | {"retry_errors": 1})
    (score,) = again["scores"]
    assert sampler.evaluated == [0] and score["errors"] == {} and score["num_attempts"] == 6
    store = session.context.store
    entries = [each for each in results(store, "rollout", "run") if not each.part]
    rows = [store.read(each.slices("traces"), ["trace_id"]) for each in entries]
    assert sorted(each.num_rows for each in rows) == [1, 6], "the first ones are kept"
    assert len({row for each in rows for row in each["trace_id"].to_pylist()}) == 7, "with another seed"
    once_more, found = evaluate(root, "run", Sampler(), evaluation=settings | {"retry_errors": 1})
    assert once_more.num_computed == 0 and found["scores"] == again["scores"]
    assert is_recorded(once_more)
    (shown,) = describe(store, "run", once_more.config)["evaluations"]
    assert shown["scores"] == again["scores"]


def test_a_set_that_cannot_be_made_stops_a_run_before_its_first_step(root):
    late = TRIED | {"every": 2, "at_start": False, "where": {"level": (1,)}}
    with pytest.raises(FieldMissing, match=r"no field 'level'"):
        train(root, "run", Sampler(), evaluation=late)
    store = open_store(root)
    assert not results(store, "rollout", "run") and not store.ledger.entries(stage="training")
    session, _ = train(root, "other", Sampler(), evaluation=late | {"every": 3})
    assert is_recorded(session), "one that is never due is not made"
    assert not results(session.context.store, "evaluation_assignment", "other")


@pytest.mark.parametrize(("lag", "overlap"), [(0, True), (1, True), (0, False)])
def test_a_run_that_is_interrupted_ends_the_evaluation_under_way_and_is_resumed(root, monkeypatch, lag, overlap):
    begun, ended = threading.Event(), threading.Event()

    class UnderWay(Sampler):
        """Samples held-out examples until the services are gone."""

        def _trace(self, row, policy):
            begun.set()
            if not overlap:  # the run waits: Ctrl-C alone ends that
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert ended.wait(PATIENCE), "nobody ended the services"
            raise ServiceFailed("service 'engine' was stopped")

    def interrupt(event, facts):
        if event == "step":
            assert begun.wait(PATIENCE)
            raise KeyboardInterrupt

    settings = {"evaluation": TRIED | {"overlap": overlap}, "steps": 3, "rollout": {"max_off_policy_steps": lag}}
    session = session_for(root, "run", **settings)
    monkeypatch.setattr(session, "close", ended.set)
    session.watchers = (interrupt,)
    with pytest.raises(KeyboardInterrupt), played(UnderWay()), record_run(session):
        loop_train(session)
    assert ended.is_set(), "or the evaluation would have been waited for as long as it takes"
    sampler = Sampler()
    _, outcome = train(root, "run", sampler, **settings)
    assert sampler.evaluated == [0, 1, 2, 3] == versions(outcome)


def test_an_evaluation_s_own_sampling_goes_before_that_of_every_environment_and_else_it_is_that_of_training(root):
    environments = [{"name": name, "taskset": {"id": "t"}, "temperature": 0.7, "stop": ["."]} for name in ("a", "b")]
    sets = [{"name": "near", "top_k": 5}, {"name": "far", "temperature": 0.0}]
    evaluation = {"temperature": 0.25, "max_tokens": 9, "sets": sets}
    training = {"top_p": 0.9, "max_tokens": 8}
    session = session_for(root, "run", environments=environments, evaluation=evaluation, rollout=training)
    configs = evaluation_configs(session.config)
    for name, expected in {"near": {"temperature": 0.25, "top_k": 5}, "far": {"temperature": 0.0}}.items():
        for environment in ("a", "b"):
            expected |= {"top_p": 0.9, "max_tokens": 9, "stop": (".",)}
            assert sampling_of(configs[name], environment) == expected

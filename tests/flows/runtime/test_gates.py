"""Runs with a gate: where they stop, how they go on, and that the weights do not depend on any of it."""

import pytest

from flows import cli
from flows.cli import gate as answering
from flows.orchestration.gate_answers import summary
from flows.orchestration.states import GateRefused
from flows.runtime.loop import plan_work
from flows.runtime.preflight import preflight
from storage.store import open_store
from tasks.runtime.services import Question, Shown
from tests.fixtures.rehearsal import SOURCE, Person, rehearse, session_for

RULE = {"type": "rule", "rule": "reward_mean > 0.45"}  # of the first step it is 0.51, of the second 0.44
PAUSE = {"type": "pause"}
REFUSED = [(0, True), (1, False)]
"""Decisions by step."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store in which the three steps of an ungated run are recorded: other runs share all but their gates."""
    root = tmp_path_factory.mktemp("gates") / "store"
    rehearse(root, "base", steps=3)
    return root


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """A store with a run whose second batch a rule has refused."""
    root = tmp_path_factory.mktemp("refused") / "store"
    with pytest.raises(GateRefused):
        rehearse(root, "run", gate=RULE)
    return root


def keys(store, run, stage="training"):
    return [(entry.step, entry.key) for entry in store.ledger.entries(run=run, stage=stage)]


def decided(store, run):
    return [(row["step"], row["approved"]) for row in answering.decisions(store, run)]


def foretold(root, name, **changes):
    """What the run would compute."""
    place = session_for(root, name, **changes).context
    return [(each.stage, each.step) for each in plan_work(place, SOURCE) if each.computed]


def test_a_refused_batch_stops_the_run_and_another_rule_lets_it_go_on(tmp_path):
    ungated = rehearse(tmp_path / "ungated", "run")
    place = tmp_path / "store"
    with pytest.raises(GateRefused) as caught:
        rehearse(place, "run", gate=RULE)
    store, message = open_store(place), str(caught.value)
    assert message.startswith("step 1: the batch was refused by rule: reward_mean > 0.45 does not hold: reward_")
    assert f"stagecoach resume run --store {place} decides again" in message
    last = store.runs.events("run")[-1]
    assert (last.event, last.message) == ("refused", message)
    assert decided(store, "run") == REFUSED and [step for step, _ in keys(store, "run")] == [0]
    rehearse(place, "run", gate=RULE | {"rule": "reward_mean > 0.4"})
    assert keys(store, "run") == keys(ungated, "run") and len(keys(ungated, "run")) == 2
    assert decided(store, "run") == [*REFUSED, (1, True)]  # the first step is not asked about again
    assert store.runs.events("run")[-1].event == "finished"


def test_what_a_rule_has_refused_is_refused_again_without_computing_anything(refused):
    with pytest.raises(GateRefused):
        rehearse(refused, "run", gate=RULE)
    assert decided(open_store(refused), "run") == REFUSED
    assert foretold(refused, "run", gate=RULE) == []
    left = [("training", 1), ("metrics", 1)]
    assert foretold(refused, "run") == left
    assert foretold(refused, "run", gate=RULE | {"rule": "true"}) == [("gate", 1), *left]


def test_a_person_who_refused_is_asked_again(root):
    first, second = Person(True, False), Person(True)
    with pytest.raises(GateRefused, match="refused by Ada: no reason given"):
        rehearse(root, "run", first, gate=PAUSE)
    assert foretold(root, "run", gate=PAUSE) == [("gate", 1)]
    store = rehearse(root, "run", second, gate=PAUSE)
    assert [question.step for question in (*first.asked, *second.asked)] == [0, 1, 1]
    assert len({question.key for question in (*first.asked, *second.asked)}) == 3
    assert decided(store, "run") == [*REFUSED, (1, True)]
    rehearse(root, "run", gate=PAUSE)  # all is decided and done; nobody is asked


def test_a_rule_speaks_for_every_run_and_a_person_for_one(root):
    person = Person(True, True)
    for name in ("one", "other"):
        rehearse(root, name, person, gate=PAUSE, steps=1)
        store = rehearse(root, f"ruled-{name}", gate=RULE, steps=1)
    assert len({question.key for question in person.asked}) == 2
    assert keys(store, "ruled-one", "gate") == keys(store, "ruled-other", "gate") != []


def test_a_rule_on_warnings_reads_the_steps_before_and_no_other_rule_does(root):
    store = rehearse(root, "warned", gate=RULE | {"rule": "warnings = 0"}, steps=3)
    rehearse(root, "plain", gate=RULE | {"rule": "true"}, steps=3)
    (*_, last) = store.ledger.entries(run="warned", stage="gate")
    measured = keys(store, "base", "metrics")
    assert {key for _, key in measured[:2]} < {*last.inputs.values()}
    assert decided(store, "warned") == [(0, True), (1, True), (2, True)] and keys(store, "warned") == keys(
        store, "base"
    )
    plain = [entry.inputs for entry in store.ledger.entries(run="plain", stage="gate")]
    assert not {key for _, key in measured} & {key for inputs in plain for key in inputs.values()}


def test_a_gate_that_was_set_up_later_asks_about_what_is_to_come(root):
    person = Person(True)
    rehearse(root, "later", steps=1)
    store = rehearse(root, "later", person, gate=PAUSE)
    assert [question.step for question in person.asked] == [1] and decided(store, "later") == [(1, True)]


def test_every_nth_step_is_asked_about_from_the_first_on(root):
    person = Person(True, True)
    rehearse(root, "nth", person, gate=PAUSE | {"every": 2}, steps=3)
    assert [question.step for question in person.asked] == [0, 2]


def test_a_rule_that_is_none_is_known_before_anything_starts(tmp_path):
    session = session_for(tmp_path, "run", gate=RULE | {"rule": "reward > 0"})
    with pytest.raises(ValueError, match=r"gate\.rule: 'reward > 0': Binder Error") as caught:
        preflight(session, [])
    assert "nothing was started" in str(caught.value)


def test_decisions_are_printed_and_an_answer_needs_a_question(refused, capsys):
    assert cli.main(["gate", "run", "--store", str(refused)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0: approved by rule: reward_mean > 0.45 holds: reward_mean 0.")
    assert lines[1].startswith("step 1: refused by rule: ")
    assert cli.main(["gate", "run", "--approve", "--store", str(refused)]) == 2
    assert "run run does not wait for an answer: it is not running" in capsys.readouterr().err
    assert cli.main(["gate", "run", "--by", "Ada", "--store", str(refused)]) == 2


def test_the_summary_shows_texts_as_they_are(tmp_path):
    shown = Shown("best", "t|1", 1.0, (("user", "# not a heading\n<b>"), ("assistant", "x" * 2000)))
    page = summary("my_run", Question(4, "k", {"num_traces": 3, "reward_mean": None}, (shown,), 1.0))
    assert page.startswith("# my\\_run, step 4: may this batch be trained on?")
    assert "| num\\_traces | 3 | rollouts, failed ones included |" in page
    assert "| reward\\_mean | - |" in page
    assert "\n    # not a heading\n    <b>\n" in page
    assert page.endswith("    " + "x" * 1500 + " ... (500 more)")


def test_a_trend_reads_the_metrics_of_the_steps_of_its_window_and_no_other_gate_does(root):
    store = rehearse(root, "trend", gate={"type": "rule", "rule": "true", "window": 3}, steps=4)
    metrics = [key for _, key in keys(store, "trend", "metrics")]
    read = [
        [key for name, key in sorted(entry.inputs.items()) if name.startswith("metrics")]
        for entry in sorted(store.ledger.entries(run="trend", stage="gate"), key=lambda entry: entry.step)
    ]
    assert read == [[], metrics[:1], metrics[:2], metrics[1:3]]
    rehearse(root, "trend", gate={"type": "rule", "rule": "true", "window": 3}, steps=5)
    last = max(store.ledger.entries(run="trend", stage="gate"), key=lambda entry: entry.step)
    assert metrics[2:] == [last.inputs["metrics"], last.inputs["metrics.1"]], "resumed, it reads the same"
    store = rehearse(root, "plain", gate={"type": "rule", "rule": "true"}, steps=2)
    assert not any("metrics" in entry.inputs for entry in store.ledger.entries(run="plain", stage="gate"))

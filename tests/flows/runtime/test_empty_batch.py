"""What an eviction says: what really became of the rollouts, counted, and what to do about each of it."""

import pytest

from flows.orchestration.states import EmptyBatch
from flows.reporting.formats import visible
from storage.store import open_store
from tests.fixtures import rehearsal
from tests.fixtures.rehearsal import SMALL, rehearse

ERRORED = {"type": "errored"}
STANDARD = [ERRORED, {"type": "zero_advantage"}]
ALL = {"error_class": "environment", "error_type": "KeyError", "error_message": "'answer'"}


@pytest.fixture
def play(monkeypatch):
    """Change the rollouts of every batch, by their number in it."""
    return lambda change: rehearsal.play(monkeypatch, rollout=rehearsal.sampled_with(change))


def evicted(root, batches=1, filters=STANDARD, **changes):
    """Run so many batches of 12 rollouts, all of them empty; return the lines of the error."""
    filtering = {"max_batch_attempts": batches, "filters": filters}
    with pytest.raises(EmptyBatch) as caught:
        rehearse(root, "base", filtering=filtering, **changes)
    assert open_store(root).runs.events("base")[-1].message == str(caught.value)
    return [line.strip() for line in str(caught.value).split("\n")]


def test_errors_are_counted_by_class_with_the_commonest_words(play, root):
    late = {"error_class": "timeout", "error_type": "TimeoutError", "error_message": "took too long"}
    play(lambda number, row: late if number == 0 else ALL)
    *lines, todo, _ = evicted(root, 3)
    assert lines == [
        "step 0: 3 batches in a row hold nothing to train on. Of 36 rollouts:",
        "33 errored (environment)",
        "3 errored (timeout)",
        "The most frequent error (33): KeyError: 'answer'",
        "Safe: everything sampled is in the store, and so are the policies made before",
    ]
    at = f"base --store {root}"
    assert f"stagecoach traces {at} --step 0" in todo
    assert f"stagecoach resume {at} filtering.max_batch_attempts=6" in todo


@pytest.mark.engine
def test_more_attempts_under_the_same_name_sample_anew_as_the_error_says(monkeypatch, root):
    with monkeypatch.context() as broken:
        rehearsal.play(broken, rollout=rehearsal.sampled_with(lambda number, row: ALL))
        evicted(root, 3)
    filtering = {"max_batch_attempts": 6, "filters": STANDARD}
    store = rehearse(root, "base", filtering=filtering)
    assert store.runs.events("base")[-1].event == "finished"
    assert len([each for each in store.ledger.entries(run="base", stage="rollout") if each.step == 0]) == 4


def test_filters_and_errors_are_told_apart(play, root):
    """Of the first group two stand, equal; of the second one; the third fails whole."""

    def change(number, row):
        return ALL if number >= 8 else {"reward": 1.0, "is_truncated": number in (0, 1, 4, 5, 6)}

    play(change)
    filters = [ERRORED, {"type": "truncated", "enforce": True}, {"type": "zero_advantage"}]
    lines = evicted(root, filters=filters)
    assert lines[1:4] == ["4 errored (environment)", "5 filtered (truncated)", "3 filtered (zero_advantage)"]


def test_a_refilled_step_counts_all_its_batches_and_who_fell_with_a_member(play, root):
    play(lambda number, row: ALL if number % 4 == 0 else {})
    filters = [ERRORED, {"type": "incomplete_group"}]
    refill = SMALL["assignment"] | {"refill": True}
    lines = evicted(root, 3, filters, assignment=refill)
    assert lines[:3] == [
        "step 0: 3 batches in a row hold nothing to train on. Of 36 rollouts:",
        "9 errored (environment)",
        "27 filtered (incomplete_group)",
    ]


def test_words_of_an_environment_cannot_act_and_are_cut_before_the_advice_at_their_end(play, root):
    hostile = "\x1b[2J\u202egnp.exe\nSafe: nothing\n" + "a" * 10_000 + ". Install the package `datasets`"
    play(lambda number, row: ALL | {"error_message": hostile, "error_type": "Bad\x07Error"})
    lines = evicted(root)
    assert len(lines) == 6 and visible("\n".join(lines)) == "\n".join(lines)
    assert "Bad␇Error: ␛[2J" in lines[2] and len(lines[2]) < 430 and lines[2].endswith("package `datasets`")

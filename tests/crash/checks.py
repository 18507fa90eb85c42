"""What must hold of a run that was killed, and of the same run called again."""

from storage.store import open_store
from tests.fixtures.driving import (
    Driven,
    Life,
    check_once,
    committed_groups,
    finished,
    rows,
    weights,
    without_ambient,
    work,
)


def killed(run: Driven, moment: str, *, prefect: bool = False) -> Life:
    """Live until `moment` and assert, by receipt and status, that the process died then and there."""
    life = run.live(moment, prefect=prefect)
    assert life.status == -9, life.output
    assert [receipt["moment"] for receipt in life.receipts] == [moment]
    assert life.moments[-1] == moment
    assert not (run.directory / "outcome.json").exists()
    return life


def check_same(run: Driven, reference: Driven) -> None:
    """Assert that two runs made the same, work, rows, weights; that neither has anything twice, and nothing is left."""
    here, there = open_store(run.store), open_store(reference.store)
    check_once(run.store)
    assert work(here) == work(there)
    assert without_ambient(rows(here)) == without_ambient(rows(there))
    assert weights(here) == weights(there)
    check_clean(run)


def go_on(run: Driven, first: Life, *, prefect: bool = False, steps: int = 2) -> Life:
    """Call the killed run again, groups in reverse order, and assert that no committed group is sampled again."""
    store = open_store(run.store)
    safe, done = committed_groups(store), len(finished(store))
    again = run.live(prefect=prefect, backwards=True)
    assert again.status == 0, again.output
    assert not safe & set(again.sampled), "a committed group was sampled again"
    assert safe | set(again.sampled) == {f"{step}-{slot}" for step in range(steps) for slot in range(3)}
    assert len(again.sampled) == len(set(again.sampled))
    assert set(first.sampled) - safe <= set(again.sampled), "a group in flight was lost"
    assert run.outcome["num_found"] == done
    assert run.outcome["num_computed"] == len(finished(open_store(run.store))) - done
    return again


def check_clean(run: Driven) -> None:
    """Assert that no weights are left half made."""
    assert list((run.store / "policies" / ".scratch").glob("*")) == []


RARELY = "training.save_optimizer_every=2"


def requests(moments: tuple[str, ...]) -> int:
    """Return how many times the learner was asked to train."""
    return sum(moment.startswith("after request train") for moment in moments)

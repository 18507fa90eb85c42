"""Whatever runs share and whatever is removed, merged and deleted: kept runs lose nothing."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from storage.maintenance.compact import maintain
from storage.maintenance.plan import PolicyRetention, plan_removal
from storage.maintenance.sweep import carry_out
from storage.store import open_store
from tests.fixtures.histories import contents, evaluate, train

RUNS = ("a", "b", "c", "d")
RUN = st.sampled_from(RUNS)
STEPS = st.text("xy", min_size=1, max_size=3)
TRAIN = st.tuples(st.just("train"), RUN, STEPS)
EVALUATE = st.tuples(st.just("evaluate"), RUN, STEPS)
MAINTAIN = st.tuples(st.just("maintain"), st.just(0))
COLLECT = st.tuples(st.just("gc"), st.sets(RUN), st.sampled_from(["all", "last", "every:2"]))
HISTORIES = st.lists(TRAIN | EVALUATE | MAINTAIN | COLLECT, min_size=2, max_size=6)


# A hundred histories take minutes on a busy disk, which is no fault: they have no limit of time.
@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(0)
@settings(max_examples=100)
@given(HISTORIES, st.sets(RUN))
@example([("train", "a", "xxx"), ("gc", {"a"}, "last")], {"a"})  # what is thinned once stays thinned
def test_kept_runs_lose_nothing(history, last):
    """Begin with a run that nobody keeps and one that shares its first step, end with gc and retention 0."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)
        patch.setattr("storage.maintenance.compact.MIN_FILES", 2)
        root = Path(directory) / "store"
        store = open_store(root)
        train(store, "train-nobody", "xz")
        made = store.ledger.find("training-xz")
        assert made is not None
        unwanted = [root / "tables" / piece.table / file.path for piece in made.outputs for file in piece.files]
        assert all(path.exists() for path in unwanted) and len(unwanted) == 2
        for what, *given_ in [("train", "a", "x"), *history]:
            {"train": _train, "evaluate": _evaluate, "maintain": _maintain, "gc": _collect}[what](store, *given_)
        _collect(store, last, "all")
        _maintain(store, 0)
        assert store.ledger.find("training-xz") is None and store.policies.find("training-xz") is None
        assert not any(path.exists() for path in unwanted), "something was removed"
        assert not list((root / "removals").glob("*"))


def _train(store, run, steps):
    train(store, f"train-{run}", steps)


def _evaluate(store, run, steps):
    if store.policies.find(f"training-{steps}"):
        evaluate(store, f"evaluate-{run}", f"training-{steps}")


def _maintain(store, hours):
    before = contents(store, store.runs.names()), _readable(store, store.runs.names())
    maintain(store, hours)
    again = open_store(store.root.address)
    assert (contents(again, again.runs.names()), _readable(again, again.runs.names())) == before


def _collect(store, runs, policies):
    keep = [run for run in store.runs.names() if run[-1] in runs and store.runs.events(run)[-1].event != "removed"]
    going = plan_removal(store, keep, retention=PolicyRetention.parse(policies))
    before, weights = contents(store, keep), _readable(store, keep)
    rows = len(store.ledger.entries())
    tried = [key for run in keep for entry in store.ledger.entries(run=run) for key in entry.inputs.values()]
    tried = [key for key in tried if store.ledger.find(key)]
    swept = carry_out(store, going)
    assert policies != "all" or not going.pruned
    for reader in (store, open_store(store.root.address)):
        assert contents(reader, keep) == before
        assert _readable(reader, keep) == weights - {*going.pruned}
        assert all(reader.ledger.find(key) for key in tried), "what went into kept work is still named"
        assert len(reader.ledger.entries()) == rows - swept.rows
        every = contents(reader, reader.runs.names())  # not a row, of any run, names what is gone
    assert set(before) <= set(every)


def _readable(store, runs):
    """Return the policies of some runs whose weights are there, digests checked; earlier gcs may have thinned them."""
    made = {entry.key for run in runs for entry in store.ledger.entries(run=run, stage="training")}
    there = {key for key in made if store.policies.find(key)}
    assert all(store.policies.directory(key, verify=True).is_dir() for key in there)
    return there

"""A run that finds quarantined rollouts in the store trains on them, and says so at the step where it does."""

from pathlib import Path
from typing import Any

import pytest

from flows.queries.step_history import step_history
from flows.runtime import loop
from flows.runtime.step_report import finish_step
from storage.store import Store
from tests.fixtures.rehearsal import SOURCE, Rehearsal, notes_of, rehearse, session_for

pytestmark = pytest.mark.engine

RLOO: dict[str, Any] = {"algorithm": {"type": "rloo"}}


def notes(root: Path, name: str, **changes: Any) -> list[str]:
    """Walk the small run as the flow does and return the warnings about quarantines."""
    session = session_for(root, name, **changes)
    told = notes_of(session)
    for finished in loop.train_steps(Rehearsal(session), SOURCE):
        finish_step(session, finished)
    return [text for text in told if "quarantine" in text]


def kept(store: Store, run: str, step: int) -> list[str]:
    """Return the rollouts of a step that the filters kept."""
    (entry,) = (entry for entry in store.ledger.entries(run=run, stage="filtering") if entry.step == step)
    return [row["trace_id"] for row in store.read(entry.slices("verdicts")).to_pylist() if row["keep"]]


def test_a_run_that_finds_quarantined_rollouts_says_so_at_their_step(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = rehearse(root, "base")
    assert notes(root, "before", **RLOO) == []
    unfit = kept(store, "base", 1)[:2]
    noted = store.quarantines.record(unfit, where="true", reason="fooled", run="base")
    (note,) = notes(root, "branch", **RLOO)
    assert set(unfit) <= set(kept(store, "branch", 1)), "they are not left out, so this must be said"
    assert note.startswith(f"step 1: 2 of {len(kept(store, 'branch', 1))} rollouts that are trained on are in")
    assert noted.quarantine in note and f"stagecoach replay branch --from filtering --store {root}" in note
    assert notes(root, "base") == [note.replace("replay branch", "replay base")], "a run that is resumed says it too"


def test_rollouts_that_the_filters_left_out_anyway_are_no_news(tmp_path: Path) -> None:
    root = tmp_path / "store"
    strict: dict[str, Any] = {"type": "gibberish", "enforce": True, "token_id_threshold": 240, "logprob_offset": -1.0}
    store = rehearse(root, "base", filtering={"filters": [strict]})
    entry = step_history(store, "base").steps[0].work["rollout"]
    every = set(store.read(entry.slices_of("traces"))["trace_id"].to_pylist())
    excluded = every - set(kept(store, "base", 0))
    assert 0 < len(excluded) < len(every), "the filters leave all or nothing out, so this shows nothing"
    store.quarantines.record(excluded, where="true", reason="fooled", run="base")
    assert notes(root, "base", filtering={"filters": [strict]}) == []
    assert len(notes(root, "lenient")) == 1

"""What became of a run's rollouts by step: as it is said of each of them, and as the accounts say before training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows.viewer.data.run_steps import steps_of
from flows.viewer.data.series import StepNumbers, numbers
from flows.viewer.library import Library
from storage.store import Store, open_store
from tasks.fates import fates_of
from tasks.inference.sampling.failures import STRAGGLER
from tasks.metrics.accounting import account
from tests.builders import trace, verdict
from tests.flows.rehearsal import rehearse
from tests.flows.viewer.hand_made import RUN, HandMade, batch, credit, update

ENDS: dict[str, dict[str, Any]] = {
    "trained": {},
    "light": {},
    "cut": {},
    "broken": {"reward": None, "error_class": "timeout"},
    "late": {"reward": None, "error_class": STRAGGLER},
}


def told(each: StepNumbers) -> dict[str, float]:
    """The accounts of a step, by fate."""
    found = {name: value for (_, name), value in each.values.items() if name.startswith("accounting/")}
    return {name.removeprefix("accounting/"): value for name, value in found.items()}


def one_by_one(library: Library, each: StepNumbers) -> dict[str, float]:
    """The same, counted over what is said of every rollout."""
    chains = [chain for chain in library.chains(RUN) if chain.traces in each.work.traces]
    rows = fates_of(library.frames(RUN), chains).select("fate", "detail").iter_rows()
    return dict(Counter("/".join(filter(None, fate)) for fate in rows))


def begun(root: Path, until: str) -> Library:
    """A step whose rollouts end in every way there is, done as far as to a stage."""
    made = HandMade(root)
    traces = [trace(name, **how) for name, how in ENDS.items()]
    keys = {"rollout": made.work("rollout", {"traces": traces})}
    stages: dict[str, dict[str, Any]] = {
        "filtering": {"verdicts": [verdict(name, reason="truncated" if name == "cut" else None) for name in ENDS]},
        "advantage": {"credits": [credit(name, 0, [0], {"rl_weights": [1.0]}) for name in ("trained", "light")]},
        "packing": {"batches": [batch(["trained/0"])]},
        "training": {"updates": [update()]},
    }
    for stage, tables in stages.items():
        if until in keys:
            break
        keys[stage] = made.work(stage, tables, 0, **keys)
    return Library.at(root)


HELD_BACK = {"filtered/truncated": 1, "errored/timeout": 1, "stopped": 1}


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        ("rollout", {"pending": 3, "errored/timeout": 1, "stopped": 1}),
        ("filtering", {"pending": 2, **HELD_BACK}),
        ("advantage", {"pending": 2, **HELD_BACK}),
        ("packing", {"pending": 1, "no weight": 1, **HELD_BACK}),
        ("training", {"trained": 1, "no weight": 1, **HELD_BACK}),
    ],
)
def test_accounts_are_as_far_as_the_step_is(tmp_path: Path, until: str, expected: dict[str, float]) -> None:
    library = begun(tmp_path, until)
    (each,) = numbers(library, RUN)
    assert told(each) == expected == one_by_one(library, each)


def test_a_rollout_of_several_samples_counts_once(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    samples = [credit("a", branch, [0], {"rl_weights": [1.0]}) for branch in (0, 1)]
    made.step([trace("a")], [], samples, batches=[batch(["a/0"]), batch(["a/1"], row=1)], updates=[update()])
    (each,) = numbers(Library.at(tmp_path), RUN)
    assert told(each) == {"trained": 1}


def test_rows_that_were_dropped_are_not_taken_for_rollouts_without_weight(tmp_path: Path) -> None:
    library = begun(tmp_path, "training")
    step = steps_of(library, RUN)[0]
    assert step.batches is not None
    open_store(tmp_path).slices.retirements.record(step.batches.slices_of("batches"), 24)
    (each,) = numbers(Library.at(tmp_path), RUN)
    assert told(each) == one_by_one(library, each)
    assert "no weight" not in told(each)


def test_they_are_those_that_a_run_reports(tmp_path: Path) -> None:
    store: Store = rehearse(tmp_path / "store", RUN, steps=1)
    library = Library.at(tmp_path / "store")
    (each,) = numbers(library, RUN)
    made = {piece.table: piece for work in each.work.works for piece in work.slices}
    tables = ("assignments", "traces", "verdicts", "credits", "batches")
    shares = account(*(store.read([made[name]]) for name in tables))
    assert told(each) == {"/".join(filter(None, (one.fate, one.detail))): one.num_traces for one in shares}

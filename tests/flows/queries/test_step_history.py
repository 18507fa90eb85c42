"""Which work belongs to a step where there is more than one way to take it; runs are ledger rows made by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

from flows.queries.step_history import RecordedStep, StepHistory
from storage.read.lineage import Graph
from storage.refs import Entry, Slice
from tasks.stages import BY_NAME

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


class Rows:
    """Ledger rows in order of time, named by their keys."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def work(self, key: str, stage: str, step: int = 0, run: str = "run", part: str = "", **inputs: str) -> str:
        """Add finished work, or a part of it; inputs are keys by stage."""
        at = BEGUN + timedelta(seconds=len(self.entries))
        table = BY_NAME[stage].table
        pieces = (Slice(table, run, key + part, 1, "", ()),)
        named = {name.replace("__", "."): value for name, value in inputs.items()}
        settings: dict[str, Any] = {"section": {}, "inputs": named, "outputs": pieces}
        self.entries.append(
            Entry(run, step, stage, 1, key, part, key + part, started_at=at, finished_at=at, **settings)
        )
        return key

    def sampled(self, name: str, step: int = 0, **of_assignment: str) -> dict[str, str]:
        """Add an assignment and its rollouts; return the rollouts as an input."""
        assigned = self.work(f"assignment-{name}", "assignment", step, **of_assignment)
        return {"rollout": self.work(f"rollout-{name}", "rollout", step, assignment=assigned)}

    def credited(self, name: str, step: int = 0, packed: bool = True, **traces: str) -> str:
        """Filter and credit rollouts and pack them; return the key of the last one."""
        judged = self.work(f"filtering-{name}", "filtering", step, **traces)
        last = self.work(f"advantage-{name}", "advantage", step, filtering=judged, **traces)
        return self.work(f"packing-{name}", "packing", step, advantage=last, **traces) if packed else last

    def trained(self, packing: str, policy: str, step: int = 0) -> str:
        """Train on what was packed."""
        return self.work(f"training-{packing}", "training", step, packing=packing, policy=policy)

    def history(self, run: str = "run") -> StepHistory:
        """What a run recorded."""
        return StepHistory(Graph(self.entries), run)

    def step(self, number: int = 0) -> RecordedStep:
        """One step of it."""
        return self.history().steps[number]


def keys(step: RecordedStep) -> dict[str, str]:
    return {name: work.key for name, work in step.work.items()}


def test_a_batch_that_is_on_its_way_does_not_count_until_it_is_judged():
    rows = Rows()
    empty = rows.sampled("empty")
    rows.credited("empty", **empty)
    again = rows.sampled("again", batch="1", assignment="assignment-empty", **empty)
    assert keys(rows.step())["packing"] == "packing-empty"
    rows.work("filtering-again", "filtering", **again)
    assert keys(rows.step()) == {
        "assignment": "assignment-again", "rollout": "rollout-again", "filtering": "filtering-again",
    }  # fmt: skip
    assert {work.key for work in rows.step().works} == {*keys(rows.step()).values()}, "a state is no part of the step"
    found = rows.history().batch(0)
    assert found is not None and found[0].key == "packing-empty", "it is there to be looked at all the same"


def test_what_was_trained_counts_whatever_was_judged_after_it():
    rows = Rows()
    traces = rows.sampled("one")
    first = rows.trained(rows.credited("old", **traces), "policy")
    rows.credited("new", **traces)
    step = rows.step()
    assert step.updates is not None and step.updates.key == first and keys(step)["packing"] == "packing-old"
    last = rows.trained("packing-new", "policy")
    (lineage,) = rows.history().lineages
    assert lineage.updates is not None and lineage.updates.key == last
    assert keys(rows.step())["packing"] == "packing-new"


def test_refills_are_of_one_batch_as_soon_as_they_are_sampled():
    rows = Rows()
    one = rows.sampled("one")
    two = rows.sampled("two", batch="1", groups="{}", assignment="assignment-one")
    names = ["assignment", "assignment.1", "rollout", "rollout.1"]
    assert list(rows.step().work) == names and keys(rows.step())["rollout.1"] == two["rollout"]
    rows.credited("both", rollout=one["rollout"], rollout__1=two["rollout"])
    assert list(rows.step().work) == [*names, "filtering", "advantage", "packing"]
    assert [work.key for work in rows.step().traces] == [one["rollout"], two["rollout"]]


def test_a_step_that_was_not_trained_goes_on_from_the_policy_trained_last():
    rows = Rows()
    rows.work("policy", "policy_import")
    traces = rows.sampled("zero")
    rows.trained(rows.credited("old", **traces), "policy")
    last = rows.trained(rows.credited("new", **traces), "policy")
    rows.sampled("one", 1)
    assert [step.policy and step.policy.key for step in rows.history().steps.values()] == ["policy", last]


def test_rollouts_in_part_are_of_the_step_while_there_are_no_others():
    rows = Rows()
    assigned = rows.work("assignment", "assignment")
    rows.work("rollout", "rollout", part="0", assignment=assigned)
    step = rows.step()
    assert [work.key for work in step.traces] == ["rollout"] and not step.finished
    assert list(step.work) == ["assignment"]
    rows.work("rollout", "rollout", assignment=assigned)
    whole = rows.step()
    assert list(whole.work) == ["assignment", "rollout"] and not whole.finished
    rows.work("metrics", "metrics", rollout="rollout")
    assert rows.step().finished


def test_what_is_left_of_a_removed_run_is_found_in_the_rows_of_those_that_share_it():
    rows = Rows()
    traces = rows.sampled("one")
    packed = rows.credited("one", **traces)
    kept = [entry for entry in rows.entries if entry.key == packed]
    shared = [Entry(**{**vars(entry), "run": "replay"}) for entry in rows.entries if entry.key != packed]
    left = StepHistory(Graph([*kept, *shared]), "run")
    assert list(left.steps[0].work) == ["assignment", "rollout", "filtering", "advantage", "packing"]
    assert left.sampled_steps == [] and [work.stage for work in left.steps[0].works] == ["packing"]

"""Two runs side by side: what they share, where they part, and what came of it, to the number."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.errors import ConfigError
from flows import cli
from flows.queries.compare import compare
from flows.queries.compare_rows import (
    MEASURES,
    StepRows,
    differences_between,
    differences_together,
    figures_together,
    join_steps,
    read_steps,
    read_values,
)
from flows.queries.compare_summary import both_numbers, ranges, sentences, sheets
from flows.queries.store_reader import StoreReader
from flows.replays.loop import diff_markdown, diff_rows
from storage.errors import RunUnknown
from storage.store import Store, open_store
from tasks.metrics.figures import MEANINGS, metric_values
from tests.fixtures import replays
from tests.fixtures.rehearsal import rehearse

NARROW = 0.25
"""A spread of rewards within which one of the first three groups is, and no other."""
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "twin": {"engine": {"threads": 2}},
    "spread": {"algorithm": {"type": "grpo", "normalise_std": True}},
    "packed": {"packing": {"tokens_per_row": 32}},
    "faster": {"training": {"learning_rate": 1e-3}},
    "strict": {"filtering": {"filters": ({"type": "errored"}, {"type": "zero_advantage", "tolerance": NARROW})}},
    "seeded": {"seed": 8},
    "gated": {"gate": {"type": "rule", "rule": "num_traces = 12"}},
}
SHORT = ("spread", "packed", "strict", "seeded", "gated")
"""Runs of one step; the others have two."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all of these runs."""
    root = tmp_path_factory.mktemp("diff") / "store"
    for name, changes in CHANGES.items():
        rehearse(root, name, **{"steps": 1 if name in SHORT else 2} | changes)
    return root


@pytest.fixture(scope="module")
def store(root: Path) -> Store:
    return open_store(root)


def states(found: dict[str, Any], step: int) -> dict[str, str]:
    return {piece["stage"]: piece["state"] for piece in found["pieces"] if piece["step"] == step}


def rows(store: Store, run: str, stage: str, table: str) -> pl.DataFrame:
    """What a run's stage made at its first step, read as the stages read it."""
    (entry,) = (entry for entry in store.ledger.entries(run=run, stage=stage) if entry.step == 0 and not entry.part)
    frame = pl.from_arrow(store.read(entry.slices(table)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_two_runs_with_the_same_keys_are_the_same_work(store: Store) -> None:
    found = compare(StoreReader(store), "base", "twin")
    assert found["same_work"] and found["parting"] is None and found["weights_part_at"] is None
    assert {piece["state"] for piece in found["pieces"]} == {"same key"} and len(found["pieces"]) == 14
    assert [(each["key"], each["b"], each["in_keys"]) for each in found["config"]] == [("engine.threads", 2, False)]
    assert found["together"]["a"] == found["together"]["b"]
    assert found["together"]["between"]["max_advantage_difference"] == 0.0
    assert sentences(found)[1].startswith("The same work: all 14 results have the same keys")


def test_another_advantage_parts_there_with_the_traces_shared(store: Store) -> None:
    found = compare(StoreReader(store), "base", "spread")
    assert found["parting"] == {"step": 0, "stage": "advantage", "state": "different key"}
    different = {stage for stage, state in states(found, 0).items() if state == "different key"}
    assert different == {"advantage", "packing", "training"}
    assert [(each["key"], each["a"], each["b"]) for each in found["config"] if each["in_keys"]] == [
        ("algorithm.normalise_std", False, True)
    ]
    assert set(states(found, 1).values()) == {"only in a"} and found["together"]["steps"] == [0]
    rewards = rows(store, "base", "rollout", "traces").select("group_id", "reward")
    from_mean = pl.col("reward") - pl.col("reward").mean().over("group_id")
    apart = rewards.select(from_mean.alias("a"), from_mean / (pl.col("reward").std(ddof=0).over("group_id") + 1e-6))
    difference = (apart["reward"] - apart["a"]).abs()
    between = found["together"]["between"]
    assert between["num_shared_traces"] == between["num_shared_samples"] == between["num_advantages_changed"] == 12
    assert between["max_advantage_difference"] == pytest.approx(difference.max())
    assert between["mean_advantage_difference"] == pytest.approx(difference.mean())
    assert found["together"]["a"]["advantage_std"] == pytest.approx(apart["a"].std(ddof=0))
    assert found["together"]["b"]["advantage_std"] == pytest.approx(1.0, abs=1e-4)
    assert between["weights_equal"] is False and found["weights_part_at"] == 0


def test_other_rows_have_another_fill_and_the_same_samples(store: Store) -> None:
    found = compare(StoreReader(store), "base", "packed")
    assert found["parting"] == {"step": 0, "stage": "packing", "state": "different key"}
    a, b = (found["together"][run] for run in "ab")
    num_tokens = rows(store, "base", "advantage", "samples")["num_tokens"].sum()
    num_rows = [rows(store, run, "packing", "batches").height for run in ("base", "packed")]
    assert a["num_tokens"] == b["num_tokens"] == num_tokens
    assert (a["num_rows"], b["num_rows"]) == tuple(num_rows) and num_rows[0] < num_rows[1]
    assert a["fill"] == num_tokens / (num_rows[0] * 64) and b["fill"] == num_tokens / (num_rows[1] * 32)
    assert (a["grad_norm"], b["grad_norm"]) == tuple(num_rows)
    assert found["together"]["between"]["num_advantages_changed"] == 0


def test_what_is_printed_needs_no_rows_of_steps_that_one_run_alone_has(store: Store) -> None:
    whole = compare(StoreReader(store), "base", "spread")
    without = compare(StoreReader(store), "base", "spread", lone=False)
    assert whole["steps"][1]["a"]["num_traces"] == 12 and without["steps"][1]["a"] == {}
    assert sentences(without) == sentences(whole) and list(sheets(without)) == list(sheets(whole))


def test_another_learning_rate_shares_all_but_training(store: Store) -> None:
    found = compare(StoreReader(store), "base", "faster")
    assert found["parting"] == {"step": 0, "stage": "training", "state": "different key"}
    assert [stage for stage, state in states(found, 0).items() if state != "same key"] == ["training"]
    learning_rates = [found["together"][run]["learning_rate"] for run in "ab"]
    assert learning_rates == [pytest.approx(1e-6), pytest.approx(1e-3)]
    assert found["together"]["a"]["loss"] == pytest.approx(0.05)  # the mean over both steps
    assert [step["first_difference"] for step in found["steps"]] == ["training", "rollout"]


def test_the_figures_of_a_step_are_those_that_it_wrote(store: Store) -> None:
    """Each is the one of the table, and that of the rows, which the figures over all steps are made of."""
    found = compare(StoreReader(store), "base", "strict")
    for run, name in (("a", "base"), ("b", "strict")):
        told = found["steps"][0][run]
        (entry, *_) = store.ledger.entries(run=name, stage="metrics")
        values = metric_values(store.read(entry.slices("metrics")))
        assert {figure: told[figure] for figure in MEANINGS} == {name: values["", f"batch/{name}"] for name in MEANINGS}
        assert told["reasons"] == ({"zero_advantage": 4} if run == "b" else {})
    step, both = found["steps"][0]["b"], found["together"]["b"]
    assert found["together"]["steps"] == [0] and step.keys() == both.keys()
    numbers = [name for name in step if name not in ("reasons", "weights")]
    assert {name: both[name] for name in numbers} == pytest.approx({name: step[name] for name in numbers})


def test_other_verdicts_are_told_by_trace(store: Store) -> None:
    found = compare(StoreReader(store), "base", "strict", step=0)
    spread = (pl.col("reward").max() - pl.col("reward").min()).over("group_id")
    lost = rows(store, "base", "rollout", "traces").filter(spread <= NARROW)["trace_id"].sort().to_list()
    assert len(lost) == 4 and found["together"]["between"]["kept_only_a"] == lost
    assert found["together"]["between"]["kept_only_b"] == []
    assert found["together"]["b"]["reasons"] == {"zero_advantage": 4}
    assert found["detail"]["verdicts"][0] == {"trace_id": lost[0], "a": "kept", "b": "zero_advantage"}
    assert {row["num_kept_a"] - row["num_kept_b"] for row in found["detail"]["groups"]} == {4}


def test_a_step_is_gone_into_by_sample_the_farthest_first(store: Store) -> None:
    found = compare(StoreReader(store), "base", "spread", step=0)["detail"]
    sizes = [abs(row["difference"]) for row in found["samples"]]
    assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
    first = found["samples"][0]
    credits = rows(store, "spread", "advantage", "samples")
    assert first["b"] == credits.filter(pl.col("sample_id") == first["sample_id"])["advantage"].item()
    assert first["difference"] == first["b"] - first["a"]
    assert found["verdicts"] == [] and len(found["groups"]) == 3
    assert found["groups"][0]["max_advantage_difference"] == sizes[0]


def test_another_seed_shares_weights_and_examples_alone(store: Store) -> None:
    found = compare(StoreReader(store), "base", "seeded")
    shared = {stage for stage, state in states(found, 0).items() if state == "same key"}
    assert shared <= {"policy_import", "examples"} and found["parting"]["stage"] == "assignment"
    assert ("seed", 7, 8) in [(each["key"], each["a"], each["b"]) for each in found["config"]]


def test_a_decision_at_a_gate_is_no_difference_in_work(store: Store) -> None:
    found = compare(StoreReader(store), "base", "gated", step=0)
    assert states(found, 0)["gate"] == "only in b" and found["parting"] is None
    assert found["together"]["between"]["weights_equal"] is True
    assert sentences(found)[1:] == [
        "The same work as far as both go: 8 results have the same keys.",
        "Only in a: step 1.",
        "The weights are equal.",
    ]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of two steps, a replay of both and one of the last, both until packing."""
    root = tmp_path_factory.mktemp("replayed") / "store"
    rehearse(root, "base")
    for name, asked in {"whole": {}, "last": {"steps": "1:"}}.items():
        replays.walk(replays.ask(root, name=name, from_stage="filtering", **asked))
    return open_store(root)


def test_weights_that_only_the_source_brought_in_part_no_replay_from_it(replayed: Store) -> None:
    found = compare(StoreReader(replayed), "base", "whole")
    assert states(found, 0)["policy_import"] == "only in a"
    assert found["parting"] == {"step": 0, "stage": "training", "state": "only in a"} and not found["same_work"]
    assert [each["first_difference"] for each in found["steps"]] == ["training"] * 2


def test_a_replay_of_later_steps_has_the_examples_and_no_first_step(replayed: Store) -> None:
    found = compare(StoreReader(replayed), "base", "last")
    assert states(found, 0)["examples"] == "same key" and found["parting"]["step"] == 1
    assert [each["only"] for each in found["steps"]] == ["only in a", None]
    assert sentences(found)[2] == "Only in a: step 0."
    assert sentences(compare(StoreReader(replayed), "last", "base"))[2] == "Only in b: step 0."


def test_what_makes_a_run_a_replay_is_no_setting_that_differs(replayed: Store) -> None:
    keys = [row["key"] for row in compare(StoreReader(replayed), "base", "last")["config"]]
    assert not [key for key in keys if key in ("name", "kind") or key.startswith("replay.")]


def test_nothing_done_is_not_the_same_work_as_weights_brought_in(replayed: Store) -> None:
    replayed.runs.record(run="begun", event="started", kind="train", config=replayed.runs.config("base"))
    assert not compare(StoreReader(replayed), "base", "begun")["same_work"]
    assert compare(StoreReader(replayed), "begun", "begun")["same_work"]


def test_what_was_not_measured_is_none_and_not_zero(store: Store) -> None:
    found = compare(StoreReader(store), "base", "gated")
    second = found["steps"][1]
    assert second["only"] == "only in a" and second["b"] == {}
    assert second["between"]["num_shared_traces"] is None and second["between"]["weights_equal"] is None
    assert set(MEASURES) <= set(second["a"])


def test_unknown_runs_and_steps_are_refused_with_those_that_there_are(store: Store) -> None:
    with pytest.raises(RunUnknown, match=r"(?s)there is no run 'absent'.*the nearest runs are: base"):
        compare(StoreReader(store), "base", "absent")
    with pytest.raises(ConfigError, match="step 5: neither run has it; there are the steps 0, 1"):
        compare(StoreReader(store), "base", "twin", step=5)


def test_differences_are_printed_for_people_and_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "base", "spread", "--step", "0", "--store", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "They differ from step 0, stage advantage on: another key. Shared results: 5." in printed
    assert "algorithm.normalise_std" in printed and "The weights part at step 0." in printed
    assert "shared samples whose advantages differ most" in printed
    assert cli.main(["diff", "base", "spread", "--json", "--store", str(root)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(compare(StoreReader(open_store(root)), "base", "spread"))
    )
    assert cli.main(["diff", "base", "absent", "--store", str(root)]) == 2


def test_the_page_and_the_table_for_prefect_say_the_same(store: Store) -> None:
    found = compare(StoreReader(store), "base", "spread")
    page = diff_markdown(found)
    assert page.startswith("# base and spread\n") and "| advantage | 0 | 1 | 1 | 0 |" in page
    (only,) = diff_rows(found)  # the other step is in one of them alone
    assert (only["step"], only["first difference"], only["weights"]) == ("0", "advantage", "differ")


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (1.0, 1.0, "1"),
        (None, None, "-"),
        (0.25, None, "0.25 → -"),
        (1.23456, 1.23457, "1.23456 → 1.23457"),
        (0.1, 0.2, "0.1 → 0.2"),
    ],
)
def test_a_pair_of_numbers_is_told_apart(a: float | None, b: float | None, text: str) -> None:
    assert both_numbers(a, b) == text


def test_steps_are_written_as_ranges() -> None:
    assert ranges([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8" and ranges([]) == ""


@pytest.mark.parametrize("finished", [True, False])
def test_figures_over_steps_are_those_of_all_their_rows(store: Store, finished: bool) -> None:
    """Out of what each step wrote, and for steps that are not finished out of their rows: as of one large step."""
    steps = [step.work | ({"metrics": step.metrics} if finished else {}) for step in history(store, "base")]
    read = read_steps(store, steps)
    rows = [getattr(join_steps(read), name) for name in ("traces", "verdicts", "samples", "batches", "updates")]
    whole = StepRows(*rows, tokens_per_row=64).numbers
    found = figures_together(read, *read_values(store, steps))
    assert len(steps) == 2 and found.keys() == whole.keys() and found["reasons"] == whole["reasons"]
    assert found["weights"] == whole["weights"] == read[1].weights != read[0].weights
    numbers = [name for name in found if name not in ("reasons", "weights")]
    assert {name: found[name] for name in numbers} == pytest.approx({name: whole[name] for name in numbers})


def test_shared_steps_are_counted_without_their_rows(store: Store) -> None:
    steps = [step.work | {"metrics": step.metrics} for step in history(store, "base")]
    thin, full = read_steps(store, steps, shared=True), read_steps(store, steps)
    assert [each.traces for each in thin] == [None, None] and [each.numbers for each in thin] == [
        each.numbers for each in full
    ]
    samples = join_steps(full).samples
    assert samples is not None
    together = differences_together([(each, each) for each in thin], samples["advantage"].count())
    assert together == differences_between(join_steps(full), join_steps(full))


def test_a_shared_step_beside_one_that_differs_is_in_the_means(store: Store) -> None:
    """Of the longest run that parts at its second step: the first is not read, and both count."""
    found = compare(StoreReader(store), "base", "faster")
    assert [each["first_difference"] for each in found["steps"]] == ["training", "rollout"]
    shared = differences_together([(each, each) for each in read_steps(store, [history(store, "base")[0].work])], 12)
    assert shared["mean_advantage_difference"] == 0.0 and shared["num_shared_samples"] == 12


def history(store: Store, run: str) -> list[Any]:
    """The steps of a run with their work."""
    return list(StoreReader(store).history(run).steps.values())


def test_a_step_differs_from_itself_as_from_a_copy_of_its_rows(store: Store) -> None:
    history = StoreReader(store).history("base").steps[0]
    for stages in (history.work, {"assignment": history.work["assignment"]}):
        (made,) = read_steps(store, [stages])
        assert differences_between(made, made) == differences_between(made, replace(made))

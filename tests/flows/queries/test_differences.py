"""Two runs compared: what they share, where they part, and their figures, to the number; as text and as pages."""

import json
import re
from typing import Any

import polars as pl
import pytest

from flows import cli
from flows.cli.difference import summary
from flows.cli.output import print_report
from flows.queries.compare import METRICS, ComparedStep, compare, first_differing_rollout
from flows.queries.store_reader import StoreReader
from storage.store import Store, open_store
from tasks.metrics.figures import metric_values
from tests.fixtures import replays
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import pluck

NARROW = 0.25
"""A spread of rewards within which one of the first three groups is, and no other."""
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "twin": {"engine": {"threads": 2}},
    "spread": {"algorithm": {"type": "grpo", "normalise_std": True}},
    "faster": {"training": {"learning_rate": 1e-3}},
    "strict": {"filtering": {"filters": ({"type": "errored"}, {"type": "zero_advantage", "tolerance": NARROW})}},
    "gated": {"gate": {"type": "rule", "rule": "num_traces = 12"}},
}
SHORT = ("spread", "strict", "gated")
"""Runs of one step; the others have two."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store with these runs, and a replay of `base` until packing."""
    root = tmp_path_factory.mktemp("diff") / "store"
    for name, changes in CHANGES.items():
        rehearse(root, name, **{"steps": 1 if name in SHORT else 2} | changes)
    replays.walk(replays.ask(root, name="whole", from_stage="filtering"))
    return root


@pytest.fixture(scope="module")
def store(root):
    return open_store(root)


@pytest.fixture(scope="module")
def library(store):
    return StoreReader(store)


def states(found: Any, step: int) -> dict[str, str]:
    return {piece["stage"]: piece["state"] for piece in found["pieces"] if piece["step"] == step}


def rows(store: Store, run: str, stage: str, table: str) -> pl.DataFrame:
    """What a run's stage made at its first step, read as the stages read it."""
    (entry,) = (entry for entry in store.ledger.entries(run=run, stage=stage) if entry.step == 0 and not entry.part)
    frame = pl.from_arrow(store.read(entry.slices(table)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_rounding_is_no_difference_in_the_summary():
    pairs = {"entropy": (0.25, 0.25 + 6e-17), "loss": (0.0, 1e-17), "reward_mean": (0.5, 0.5001)}
    totals = [{"figure": name, "a": a, "b": b, "difference": b - a} for name, (a, b) in pairs.items()]
    empty = {"parting": None, "first_rollout": None, "config": [], "evaluations": []}
    report = summary(empty | {"totals": totals, "runs": [{"run": "a"}, {"run": "b"}]})
    assert [row["figure"] for row in report["figures"]] == ["reward_mean"]


PARTING: dict[str, tuple[str, set[str], list[tuple[str, Any, Any]]]] = {
    "spread": ("advantage", {"advantage", "packing", "training"}, [("algorithm.normalise_std", False, True)]),
    "faster": ("training", {"training"}, [("training.learning_rate", 1e-6, 1e-3)]),
}
"""By run: the first stage whose key differs from that of `base` at step 0, all such stages, and the settings."""


@pytest.mark.parametrize("run", PARTING)
def test_a_setting_parts_the_runs_at_the_stage_that_reads_it(library, run):
    stage, different, settings = PARTING[run]
    found = compare(library, "base", run)
    assert found["parting"] == {"step": 0, "stage": stage, "state": "different key"}
    assert {name for name, state in states(found, 0).items() if state == "different key"} == different
    assert [(each["key"], each["a"], each["b"]) for each in found["config"] if each["in_keys"]] == settings


def test_two_runs_with_the_same_keys_are_the_same_work(library):
    found = compare(library, "base", "twin")
    assert found["same_work"] and found["parting"] is None
    assert {piece["state"] for piece in found["pieces"]} == {"same key"} and len(found["pieces"]) == 14
    assert [(each["key"], each["b"], each["in_keys"]) for each in found["config"]] == [("engine.threads", 2, False)]
    assert found["totals"] and not any(row["difference"] for row in found["totals"])
    assert all(step["weights_equal"] for step in found["steps"])


def test_another_advantage_parts_there_with_the_traces_shared(store, library):
    found = compare(library, "base", "spread")
    assert set(states(found, 1).values()) == {"only in a"} and pluck(found["steps"], "step", "only") == [
        (0, None),
        (1, "only in a"),
    ]
    rewards = rows(store, "base", "rollout", "traces").select("group_id", "reward")
    from_mean = pl.col("reward") - pl.col("reward").mean().over("group_id")
    apart = rewards.select(from_mean.alias("a"), from_mean / (pl.col("reward").std(ddof=0).over("group_id") + 1e-6))
    samples = ComparedStep(library, "base", "spread", 0).samples
    differences = (apart["reward"] - apart["a"]).abs().sort(descending=True)
    assert samples.height == 12 and samples["difference"].abs().to_list() == pytest.approx(differences.to_list())
    (total,) = (row for row in found["totals"] if row["figure"] == "advantage_std")
    assert (total["a"], total["b"]) == (pytest.approx(apart["a"].std(ddof=0)), pytest.approx(1.0, abs=1e-4))
    assert found["steps"][0]["weights_equal"] is False


def test_the_figures_of_a_step_are_those_that_it_wrote(store, library):
    (entry, *_) = store.ledger.entries(run="strict", stage="metrics")
    values = metric_values(store.read(entry.slices("metrics")))
    figures = {row["figure"]: row["b"] for row in compare(library, "base", "strict")["figures"] if row["step"] == 0}
    written = {name: values.get(("", metric)) for name, metric in METRICS.items()}
    assert figures["num_kept"] == 8 and figures == {name: value for name, value in written.items() if value is not None}


def test_figures_over_steps_are_sums_of_counts_and_means_of_the_rest(library):
    found = compare(library, "base", "faster")
    first, second = ({row["figure"]: row["a"] for row in found["figures"] if row["step"] == step} for step in (0, 1))
    total = {row["figure"]: row["a"] for row in found["totals"]}
    assert total["num_traces"] == 24 and total["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert total["reward_max"] == max(first["reward_max"], second["reward_max"])
    assert total["reward_std"] == pytest.approx((first["reward_std"] + second["reward_std"]) / 2)


def test_other_verdicts_are_told_by_trace(store, library):
    spread = (pl.col("reward").max() - pl.col("reward").min()).over("group_id")
    lost = rows(store, "base", "rollout", "traces").filter(spread <= NARROW)["trace_id"].sort().to_list()
    detail = ComparedStep(library, "base", "strict", 0).detail()
    verdict = {"a": "kept", "b": "zero_advantage"}
    assert len(lost) == 4 and detail["verdicts"] == [{"trace_id": trace_id} | verdict for trace_id in lost]


def test_a_step_is_gone_into_by_sample_the_farthest_first(store, library):
    detail = ComparedStep(library, "base", "spread", 0).detail()
    sizes = [abs(row["difference"]) for row in detail["samples"]]
    assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
    first = detail["samples"][0]
    credits = rows(store, "spread", "advantage", "samples")
    assert first["b"] == credits.filter(sample_id=first["sample_id"])["advantage"].item()
    assert first["difference"] == first["b"] - first["a"]
    assert detail["verdicts"] == []


def test_a_decision_at_a_gate_is_no_difference_in_work(library):
    found = compare(library, "base", "gated")
    assert states(found, 0)["gate"] == "only in b" and found["parting"] is None
    assert not found["same_work"] and pluck(found["steps"], "only", "weights_equal") == [
        (None, True),
        ("only in a", None),
    ]


def test_weights_that_only_the_source_brought_in_part_no_replay_from_it(library):
    found = compare(library, "base", "whole")
    assert states(found, 0)["policy_import"] == "only in a"
    assert found["parting"] == {"step": 0, "stage": "training", "state": "only in a"} and not found["same_work"]
    assert [each["first_difference"] for each in found["steps"]] == ["training"] * 2
    keys = [row["key"] for row in found["config"]]
    assert not [key for key in keys if key in ("name", "kind") or key.startswith("replay.")]


def test_nothing_done_is_not_the_same_work_as_weights_brought_in(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=1)
    store.runs.record(run="begun", event="started", kind="train", config=store.runs.config("base"))
    assert not compare(StoreReader(store), "base", "begun")["same_work"]
    assert compare(StoreReader(store), "begun", "begun")["same_work"]


def test_differences_are_printed_for_people_and_for_programs(root, library, capsys):
    assert cli.main(["diff", "base", "spread", "--step", "0", "--store", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "algorithm.normalise_std" in printed and re.search(r"parting:\n.*\n0\tadvantage\tdifferent key", printed)
    assert "samples:\n" in printed
    assert cli.main(["diff", "base", "spread", "--json", "--store", str(root)]) == 0
    found = compare(library, "base", "spread")
    first = first_differing_rollout(library, "base", "spread")
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dict(found) | {"first_rollout": first}))
    assert (first["step"], first["trace_id_a"]) == (0, first["trace_id_b"])
    assert first["advantage_a"] != first["advantage_b"] and first["reply_a"] == first["reply_b"]


def test_the_summary_fits_a_screen_settings_first(root, library, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["diff", "base", "faster", "--store", str(root)]) == 0
    said = capsys.readouterr().out
    assert "work: differs from step 0 on, stage training\nsettings: training.learning_rate: 1e-06 to 0.001" in said
    assert said.index("settings: ") < said.index("figures:") < said.index("first rollout: ")
    long = {"key": "a." * 20, "a": "x" * 200, "b": "y" * 200, "in_keys": False}
    first = {**first_differing_rollout(library, "base", "spread"), "reply_b": "some other words " * 30}
    print_report(summary({**compare(library, "base", "spread"), "config": [long] * 50, "first_rollout": first}))
    lines = capsys.readouterr().out.splitlines()
    assert 20 < len(lines) <= 40 and max(map(len, lines)) <= 80


def test_unknown_runs_and_steps_are_refused_with_the_nearest(root, capsys):
    for arguments, message in (
        (["absent"], "there is no run 'absent'"),
        (["twin", "--step", "5"], "the nearest are 1, 0"),
    ):
        assert cli.main(["diff", "base", *arguments, "--store", str(root)]) == 2
        assert message in capsys.readouterr().err

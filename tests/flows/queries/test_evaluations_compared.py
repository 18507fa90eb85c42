"""Evaluations of several runs beside each other: over which rollouts and examples their figures and differences are."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli.comparisons import SCHEMA, evals
from flows.queries.compare import compare
from flows.queries.store_reader import StoreReader
from tasks.assignment.examples import FieldMissing
from tests.fixtures.evaluations import HELD_OUT, Sampler, evaluate, train

pytestmark = pytest.mark.engine  # whole runs: about a second each
TRIED = {"num_examples": 4, "attempts": 2, "every": 1}


@pytest.mark.essential
def test_evaluations_of_runs_stand_side_by_side_in_all_and_by_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, settings = str(tmp_path / "store"), TRIED | {"num_examples": HELD_OUT, "pass_at": (1, 2)}
    train(tmp_path / "store", "one", Sampler(), evaluation=settings)
    evaluate(tmp_path / "store", "two", Sampler(frozenset({"eval-reverse_text-0/0"})), seed=8, evaluation=settings)
    assert evals("one", "two", as_json=True, store=root) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["version"]) for row in rows if row["figure"] == "avg"] == [
        *(("one", 0), ("one", 1), ("one", 2), ("two", 0)),
    ]
    first, later, *_, other = [row for row in rows if row["figure"] == "avg"]
    assert first["difference"] is None and first["value"] == pytest.approx(0.13) and first["low"] < 0.13 < first["high"]
    assert later["difference"] == pytest.approx(0.1) and later["num_paired"] == HELD_OUT
    assert other["num_errors"] == 1 and other["floor"] < other["value"]
    target = tmp_path / "probe.parquet"
    assert evals("one", by="tier", output=str(target), store=root) == 0
    written = pq.read_table(target)
    assert written.schema.equals(SCHEMA) and written.num_rows == 3 * 3 * 3, "versions, tiers, figures"
    buckets = {(row["bucket"], row["figure"]): row for row in written.to_pylist() if row["version"] == 0}
    assert {bucket for bucket, _ in buckets} == {"0", "1", "2"}
    assert buckets["2", "avg"]["value"] == pytest.approx(0.14) and buckets["2", "pass@2"]["num_examples"] == 2
    evals("one", by="tier", store=root)
    assert "to the first" in capsys.readouterr().out
    with pytest.raises(FieldMissing, match=r"no field 'level'.*whose task has the fields tier"):
        evals("one", by="level", store=root)


def test_two_runs_are_compared_set_by_set(tmp_path: Path) -> None:
    sets = ({"name": "hard", "where": {"tier": [2]}, "num_examples": 2}, {"name": "all", "num_examples": HELD_OUT})
    settings, failing = {"every": 2, "retry_errors": 1, "sets": sets}, frozenset({"eval-reverse_text-0/0"})
    train(tmp_path / "store", "one", Sampler(), evaluation=settings)
    session, _ = train(tmp_path / "store", "two", Sampler(failing), seed=8, evaluation=settings)
    rows = compare(StoreReader(session.context.store), "one", "two")["evaluations"]
    hard = [row for row in rows if row["set"] == "hard" and row["figure"] == "avg"]
    assert [(row["version_a"], row["version_b"]) for row in hard] == [(0, 0), (2, 2)]
    assert hard[0]["num_examples"] == 1 and hard[0]["a"] in (pytest.approx(0.12), pytest.approx(0.15)), "one failed"
    assert hard[1]["num_examples"] == 2 and hard[1]["a"] == pytest.approx(0.335)
    assert {row["set"] for row in rows} == {"hard", "all"}


def test_two_runs_are_compared_by_what_an_evaluation_counts_and_not_by_opponents(tmp_path: Path) -> None:
    class Opposed(Sampler):
        """Fails at first where it is told to, and has a frozen opponent who always earns 1 in every evaluation."""

        def __call__(self, tables: Any, config: Any, *, step: int, policy: Any) -> Any:
            made = super().__call__(tables, config, step=step, policy=policy)
            if not tables["assignments"]["group_id"][0].as_py().startswith("eval-"):
                return made
            self.failing.clear()
            others = [
                row | {"trace_id": f"{row['trace_id']}-other", "agent": "other", "trainable": False, "reward": 1.0}
                for row in made["traces"].to_pylist()
            ]
            rows = [*made["traces"].to_pylist(), *others]
            return made | {"traces": pa.Table.from_pylist(rows, made["traces"].schema)}

    settings = TRIED | {"every": 2, "retry_errors": 1}
    for name, failing in (("one", frozenset[str]()), ("two", frozenset({"eval-reverse_text-0/0"}))):
        session, outcome = train(tmp_path / "store", name, Opposed(failing), seed=3 + len(failing), evaluation=settings)
        (average, *_) = [score["average"] for each in outcome["evaluations"] for score in each["scores"]]
        found = compare(StoreReader(session.context.store), "one", name)["evaluations"]
        assert found[0]["b"] == pytest.approx(average), "the replacement counts, and no opponent"
    assert found[0]["a"] < 0.2


def test_figures_and_differences_say_over_how_many_examples_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = frozenset({"eval-reverse_text-0/0", "eval-reverse_text-0/1", "eval-reverse_text-1/0"})
    settings = TRIED | {"pass_at": (1, 2)}
    evaluate(tmp_path / "store", "one", Sampler(lost), evaluation=settings)
    evaluate(tmp_path / "store", "two", Sampler(), seed=8, evaluation=settings)
    evals("one", "two", as_json=True, store=str(tmp_path / "store"))
    rows = json.loads(capsys.readouterr().out)
    assert [row["num_examples"] for row in rows] == [3, 3, 2, 4, 4, 4], "those that the figure is of"
    assert [row["num_paired"] for row in rows] == [None] * 3 + [3, 3, 2]
    evals("one", "two", store=str(tmp_path / "store"))
    *_, last = capsys.readouterr().out.splitlines()
    assert "of 2" in last, "not over the four beside it"

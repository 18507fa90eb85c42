"""Evaluations of several runs beside each other: over which rollouts and examples their figures and differences are."""

import json

import pyarrow.parquet as pq
import pytest

from flows.cli.comparisons import evals
from flows.cli.evaluation_rows import SCHEMA
from flows.queries.compare import compare
from flows.queries.store_reader import StoreReader
from tasks.assignment.examples import FieldMissing
from tests.fixtures.evaluations import HELD_OUT, Sampler, evaluate, train

pytestmark = pytest.mark.engine  # whole runs: about a second each
TRIED = {"num_examples": 4, "attempts": 2, "every": 1}


@pytest.mark.essential
def test_evaluations_of_runs_stand_side_by_side_in_all_and_by_tier(tmp_path, capsys, monkeypatch):
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
    capsys.readouterr()
    evals("one", by="tier", store=root)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert sorted(heading.split("\t")) == sorted(SCHEMA.names) and len(lines) == written.num_rows
    monkeypatch.setenv("COLUMNS", "160")
    evals("one", by="tier", store=root)
    assert "to the first" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    evals("one", "two", store=root)
    lines = capsys.readouterr().out.splitlines()
    assert "to the first" in lines[0] and len(lines) == 13 and max(map(len, lines)) <= 80, "a line for each figure"
    with pytest.raises(FieldMissing, match=r"no field 'level'.*whose task has the fields tier"):
        evals("one", by="level", store=root)


def test_two_runs_are_compared_set_by_set(tmp_path):
    sets = ({"name": "hard", "where": {"tier": [2]}, "num_examples": 2}, {"name": "all", "num_examples": HELD_OUT})
    settings, failing = {"every": 2, "retry_errors": 1, "sets": sets}, frozenset({"eval-reverse_text-0/0"})
    train(tmp_path / "store", "one", Sampler(), evaluation=settings)
    session, _ = train(tmp_path / "store", "two", Sampler(failing), seed=8, evaluation=settings)
    rows = compare(StoreReader(session.context.store), "one", "two")["evaluations"]
    hard = [row for row in rows if row["set"] == "hard" and row["figure"] == "avg"]
    assert [(row["version_a"], row["version_b"]) for row in hard] == [(0, 0), (2, 2)]
    assert [row["num_examples"] for row in hard] == [1, 1], "the one that did not fail in the second run"
    assert hard[0]["a"] in (pytest.approx(0.12), pytest.approx(0.15))
    assert hard[1]["a"] - hard[0]["a"] == pytest.approx(0.2), "each later policy earns a tenth more"
    assert [row["difference"] for row in hard] == pytest.approx([0.0, 0.0])
    assert {row["set"] for row in rows} == {"hard", "all"}

"""What is exported of rollouts that runs share, and of those in quarantine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import RunConfig
from flows import cli
from flows.exchange.export import ExportRefused, ExportResult, RolloutChoice, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from storage.refs import Slice
from storage.slices import Slices
from storage.store import Store, open_store
from tasks.filtering import stage as filtering
from tasks.runtime.execute import perform
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref, Stage, ref_of
from tests.fixtures.builders import stage_of
from tests.flows.exchange.files import TOKENS, lines, rows, sampled_trace, write_lines


@pytest.fixture
def store(tmp_path):
    """A store with an imported run `base` of ten rollouts in two groups, all of them kept."""
    import_files(ImportRequest([TOKENS], name="base", store=str(tmp_path / "store")))
    store = open_store(tmp_path / "store")
    filtered(store, "base", {})
    return store


def context_of(store: Store, run: str) -> RunContext:
    """Return where a run works that has the rollouts of `base`."""
    sections = {"name": run, "filtering": {"filters": [{"type": "errored"}]}}
    return RunContext(store, run, RunConfig.model_validate(store.runs.config("base") | sections), {})


def rollouts(store: Store, run: str = "base") -> Ref:
    """Return the rollouts of an imported run."""
    return ref_of(step_history(store, run).steps[0].work["rollout"].entry, computed=False)


def filtered(store: Store, run: str, quarantined: Mapping[str, str], *traces: Ref) -> None:
    """Filter the rollouts in a run."""
    refs = (*traces, rollouts(store))
    more = {"quarantine": "some"} if quarantined else {}
    perform(filtering.STAGE, context_of(store, run), 0, refs, parameters=quarantined, extra_inputs=more)


def shared(store: Store, run: str, reward: float | None = None, quarantined: Mapping[str, str] | None = None) -> None:
    """Make a run that shares the rollouts of `base`, scored again where a reward is given, and filters them."""
    context, work = context_of(store, run), step_history(store, "base").steps[0].work
    store.runs.record(run=run, event="started", kind="replay", config=context.config.model_dump(mode="json"))
    for name in ("examples", "assignment", "rollout"):
        context.adopt(work[name].entry, 0)
    again = []
    if reward is not None:
        again = [perform(scoring(reward), context, 0, (rollouts(store),))]
    filtered(store, run, quarantined or {}, *again)


def scoring(reward: float) -> Stage:
    """Return a stage that gives every trace the same reward."""

    def score(tables: Mapping[str, pa.Table], config: Any) -> dict[str, pa.Table]:
        traces = tables["traces"]
        at = traces.schema.get_field_index("reward")
        return {"traces": traces.set_column(at, traces.schema.field(at), pa.array([reward] * traces.num_rows))}

    return stage_of("regrade", score, ("traces",), ("traces",))


def out(store: Store, target: Path, run: str, form: Any = "sft", **choice: Any) -> ExportResult:
    return export(form, target, RolloutChoice(run, **choice), store=str(store.root.directory), force=True)


def rewards(path: Path) -> list[float]:
    return [line["reward"] for line in lines(path)]


def traces_of(store: Store) -> list[str]:
    found: list[str] = rows(store.root.address, "base", "traces")["trace_id"].to_pylist()
    return found


def test_batches_that_were_scored_together_are_exported_once(store, tmp_path):
    more = write_lines(tmp_path / "more.jsonl", [sampled_trace("a", "x", 1.0), sampled_trace("b", "y", 0.0)])
    import_files(ImportRequest([more], name="more", store=str(store.root.directory)))
    context = context_of(store, "both")
    store.runs.record(run="both", event="started", kind="replay", config=context.config.model_dump(mode="json"))
    for run in ("base", "more"):
        for name in ("examples", "assignment", "rollout"):
            context.adopt(step_history(store, run).steps[0].work[name].entry, 0)
    perform(scoring(0.5), context, 0, (rollouts(store), rollouts(store, "more")))
    assert out(store, tmp_path / "a.jsonl", "both").number == 12
    assert rewards(tmp_path / "a.jsonl") == [0.5] * 12
    assert len({line["trace_id"] for line in lines(tmp_path / "a.jsonl")}) == 12


def test_steps_of_which_no_rollout_is_chosen_are_not_read(store, tmp_path, monkeypatch):
    options = {"name": "dealt", "groups_per_step": 1, "store": str(store.root.directory)}
    import_files(ImportRequest([TOKENS], **options))
    whole: list[str] = []

    def read(self: Slices, slices: Sequence[Slice], columns: Sequence[str] | None = None) -> pa.Table:
        whole.extend(piece.table for piece in slices if columns is None)
        return original(self, slices, columns)

    original = Slices.read
    monkeypatch.setattr(Slices, "read", read)
    assert out(store, tmp_path / "a.jsonl", "dealt", where="step = 1").number == 5
    assert sorted(whole) == ["assignments", "examples", "messages", "traces"]
    whole.clear()
    assert out(store, tmp_path / "b.jsonl", "dealt").number == 10
    assert (whole.count("examples"), whole.count("traces")) == (1, 2)


def test_rewards_and_verdicts_are_those_of_the_run(store, tmp_path):
    shared(store, "again", reward=0.125, quarantined=dict.fromkeys(traces_of(store)[:3], "why"))
    assert out(store, tmp_path / "a.jsonl", "base", where="keep").number == 10
    assert out(store, tmp_path / "b.jsonl", "again", where="keep").number == 7
    assert 1.0 in rewards(tmp_path / "a.jsonl") and rewards(tmp_path / "b.jsonl") == [0.125] * 7


def test_datasets_leave_rollouts_in_quarantine_out_and_say_so(store, tmp_path, capsys):
    store.quarantines.record(traces_of(store)[:3], where="true", reason="fooled", run="base")
    assert out(store, tmp_path / "a.jsonl", "base", where="keep") == ExportResult(7, 3)
    assert out(store, tmp_path / "a.jsonl", "base", quarantined=True) == ExportResult(10, 0)
    assert out(store, tmp_path / "a.jsonl", "base", "verifiers") == ExportResult(7, 3)
    argv = ["export", "base", "--format", "sft", "--to", str(tmp_path / "b.jsonl")]
    argv += ["--store", str(store.root.directory)]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/b.jsonl: 7 samples",
        "left out: 3 rollouts in quarantine (--quarantined keeps them)",
    ]
    assert cli.main([*argv, "--force", "--quarantined"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/b.jsonl: 10 samples\n"


def test_pairs_are_made_without_rollouts_in_quarantine(store, tmp_path):
    out(store, tmp_path / "a.jsonl", "base", "preferences")
    best = [line["chosen_trace_id"] for line in lines(tmp_path / "a.jsonl")]
    store.quarantines.record(best, where="true", reason="fooled", run="base")
    assert out(store, tmp_path / "b.jsonl", "base", "preferences").num_quarantined == len(best) == 2
    assert not set(best) & set((tmp_path / "b.jsonl").read_text().split('"'))


def test_a_run_all_in_quarantine_is_refused_with_the_reason(store, tmp_path):
    store.quarantines.record(traces_of(store), where="true", reason="fooled", run="base")
    with pytest.raises(ExportRefused, match="10 rollouts were left out because they are in quarantine"):
        out(store, tmp_path / "a.jsonl", "base")
    assert not (tmp_path / "a.jsonl").exists()

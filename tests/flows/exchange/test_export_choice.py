"""What is exported where runs differ about the same rollouts, and of those in quarantine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import RunConfig
from flows import cli
from flows.exchange.export import ExportResult, export
from flows.exchange.export_rows import ExportRefused, RolloutChoice
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from storage.store import Store, open_store
from tasks.filtering import stage as filtering
from tasks.runtime.execute import perform
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref, Stage, ref_of
from tests.fixtures.builders import stage_of
from tests.flows.exchange.files import TOKENS, lines, rows, sampled_trace, write_lines


@pytest.fixture
def store(tmp_path: Path) -> Store:
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


def out(store: Store, target: Path, run: str = "", form: Any = "sft", **choice: Any) -> ExportResult:
    return export(form, target, RolloutChoice(run, **choice), store=str(store.root.directory), force=True)


def rewards(path: Path) -> list[float]:
    return [line["reward"] for line in lines(path)]


def traces_of(store: Store) -> list[str]:
    found: list[str] = rows(store.root.address, "base", "traces")["trace_id"].to_pylist()
    return found


BEST = "select trace_id from base.traces where reward = 1.0"


def test_batches_that_were_scored_together_are_exported_once(store: Store, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["aa", "zz"])
def test_rewards_of_two_runs_are_not_chosen_by_the_alphabet(name: str, store: Store, tmp_path: Path) -> None:
    assert out(store, tmp_path / "a.jsonl", sql=BEST).number == 1
    shared(store, name, reward=0.125)
    with pytest.raises(ExportRefused, match=r"step 0 have other rewards in each of the runs .*Name the run"):
        out(store, tmp_path / "b.jsonl", sql=BEST)
    assert not (tmp_path / "b.jsonl").exists()
    for run, reward in (("base", 1.0), (name, 0.125)):
        assert out(store, tmp_path / "c.jsonl", run, sql=BEST).number == 1
        assert rewards(tmp_path / "c.jsonl") == [reward]
        named = BEST.replace("trace_id", f"'{run}' as run, trace_id")
        assert out(store, tmp_path / "d.jsonl", sql=named).number == 1
        assert rewards(tmp_path / "d.jsonl") == [reward]


def test_verdicts_of_two_runs_are_not_chosen_by_the_alphabet_either(store: Store, tmp_path: Path) -> None:
    shared(store, "aa", quarantined=dict.fromkeys(traces_of(store)[:3], "why"))
    every = "select trace_id from base.traces"
    assert out(store, tmp_path / "a.jsonl", sql=every).number == 10, "the rewards are the same"
    with pytest.raises(ExportRefused, match="other rewards or verdicts"):
        out(store, tmp_path / "a.jsonl", sql=every, kept=True)
    assert out(store, tmp_path / "a.jsonl", "base", sql=every, kept=True).number == 10
    assert out(store, tmp_path / "a.jsonl", "aa", sql=every, kept=True).number == 7


def test_datasets_leave_rollouts_in_quarantine_out_and_say_so(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.quarantines.record(traces_of(store)[:3], where="true", reason="fooled", run="base")
    assert out(store, tmp_path / "a.jsonl", "base", kept=True) == ExportResult(7, 3)
    assert out(store, tmp_path / "a.jsonl", "base", quarantined=True) == ExportResult(10, 0)
    assert out(store, tmp_path / "a.jsonl", "base", "verifiers") == ExportResult(10, 0), "a copy of the run is whole"
    assert out(store, tmp_path / "a.jsonl", "base", "verifiers", kept=True) == ExportResult(7, 3)
    argv = ["export", "base", "--format", "sft", "--to", str(tmp_path / "b.jsonl")]
    argv += ["--store", str(store.root.directory)]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/b.jsonl: 7 samples",
        "left out: 3 rollouts in quarantine (--quarantined keeps them)",
    ]
    assert cli.main([*argv, "--force", "--quarantined"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/b.jsonl: 10 samples\n"


def test_pairs_are_made_without_rollouts_in_quarantine(store: Store, tmp_path: Path) -> None:
    out(store, tmp_path / "a.jsonl", "base", "preferences")
    best = [line["chosen_trace_id"] for line in lines(tmp_path / "a.jsonl")]
    store.quarantines.record(best, where="true", reason="fooled", run="base")
    assert out(store, tmp_path / "b.jsonl", "base", "preferences").num_quarantined == len(best) == 2
    assert not set(best) & set((tmp_path / "b.jsonl").read_text().split('"'))


def test_a_run_all_in_quarantine_is_refused_with_the_reason(store: Store, tmp_path: Path) -> None:
    store.quarantines.record(traces_of(store), where="true", reason="fooled", run="base")
    with pytest.raises(ExportRefused, match="10 rollouts were left out because they are in quarantine"):
        out(store, tmp_path / "a.jsonl", "base")
    assert not (tmp_path / "a.jsonl").exists()

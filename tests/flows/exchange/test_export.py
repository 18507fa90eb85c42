"""Exporting: rollouts of a run as files, whole or not at all, which are imported as they were; which are chosen."""

import json

import polars as pl
import pyarrow as pa
import pytest

from configs.run import RunConfig
from flows import cli
from flows.exchange.export import ExportRefused, ExportResult, RolloutChoice, copy_weights, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from flows.reporting.output_files import OutputRefused, write_whole
from storage.store import open_store
from tasks.assignment.examples import read_demonstrations
from tasks.filtering import stage as filtering
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import perform, ref_of
from tasks.runtime.weights_sum import SUMS_FILE
from tests.fixtures.builders import stage_of
from tests.flows.exchange.files import TOKENS, lines, rows, sampled_trace, write_lines


def imported(root):
    """Return a new store with an imported run `base` of ten rollouts in two groups, all of them kept."""
    import_files(ImportRequest([TOKENS], name="base", store=str(root)))
    store = open_store(root)
    filtered(store, "base", {})
    return store


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A store that no test changes."""
    return imported(tmp_path_factory.mktemp("exporting") / "store")


@pytest.fixture
def store(tmp_path):
    """A store of the test."""
    return imported(tmp_path / "store")


def context_of(store, run):
    """Return where a run works that has the rollouts of `base`."""
    sections = {"name": run, "filtering": {"filters": [{"type": "errored"}]}}
    return RunContext(store, run, RunConfig.model_validate(store.runs.config("base") | sections), {})


def rollouts(store, run="base"):
    """Return the rollouts of an imported run."""
    return ref_of(step_history(store, run).steps[0].work["rollout"].entry, computed=False)


def filtered(store, run, quarantined, *traces):
    """Filter the rollouts in a run."""
    refs = (*traces, rollouts(store))
    more = {"quarantine": "some"} if quarantined else {}
    perform(filtering.STAGE, context_of(store, run), 0, refs, parameters=quarantined, extra_inputs=more)


def shared(store, run, reward=None, quarantined=None):
    """Make a run that shares the rollouts of `base`, scored again where a reward is given, and filters them."""
    context, work = context_of(store, run), step_history(store, "base").steps[0].work
    store.runs.record(run=run, event="started", kind="replay", config=context.config.model_dump(mode="json"))
    for name in ("examples", "assignment", "rollout"):
        context.adopt(work[name].entry, 0)
    again = []
    if reward is not None:
        again = [perform(scoring(reward), context, 0, (rollouts(store),))]
    filtered(store, run, quarantined or {}, *again)


def scoring(reward):
    """Return a stage that gives every trace the same reward."""

    def score(tables, config):
        traces = tables["traces"]
        at = traces.schema.get_field_index("reward")
        return {"traces": traces.set_column(at, traces.schema.field(at), pa.array([reward] * traces.num_rows))}

    return stage_of("regrade", score, ("traces",), ("traces",))


def out(store, target, run="base", form="sft", force=True, **choice):
    """Export a run."""
    return export(form, target, RolloutChoice(run, **choice), store=store.root.address, force=force)


def rewards(path):
    return [line["reward"] for line in lines(path)]


def traces_of(store):
    found = rows(store.root.address, "base", "traces")["trace_id"].to_pylist()
    return found


def test_what_was_exported_is_imported_as_it_was(base, tmp_path):
    assert out(base, tmp_path / "t.jsonl", form="verifiers").number == 10
    assert lines(tmp_path / "t.jsonl") == lines(TOKENS)
    import_files(ImportRequest([tmp_path / "t.jsonl"], name="again", store=str(tmp_path / "store")))
    for table in ("traces", "messages"):
        assert rows(str(tmp_path / "store"), "again", table).equals(rows(base.root.address, "base", table))


def test_episodes_of_several_traces_or_none_come_back_as_they_were(tmp_path):
    pair, judged, broken, alone, *_ = lines(TOKENS)
    judge = judged["traces"][0] | {"agent": judged["traces"][0]["agent"] | {"name": "judge", "trainable": False}}
    error = {"type": "SandboxError", "message": "gone"}
    nothing = broken | {"ok": False, "errors": [error], "traces": []}
    by_itself = alone["traces"][0] | {"info": {"episode_id": "e", "env_name": "rev"}}
    given = [nothing, pair | {"traces": [*pair["traces"], judge]}, by_itself]
    write_lines(tmp_path / "t.jsonl", given)
    outcome = import_files(ImportRequest([tmp_path / "t.jsonl"], name="run", store=str(tmp_path / "store")))
    store = open_store(tmp_path / "store")
    assert outcome.figures["traces"] == 4
    assert out(store, tmp_path / "out.jsonl", "run", "verifiers").number == 3
    assert lines(tmp_path / "out.jsonl") == given
    out(store, tmp_path / "one.jsonl", "run", "verifiers", where=f"trace_id = '{judge['id']}'")
    assert lines(tmp_path / "one.jsonl") == [given[1]], "an episode is exported whole"


def test_supervised_samples_feed_the_supervised_trainer(base, tmp_path):
    num_good = sum(row["traces"][0]["rewards"]["similarity"]["score"] >= 0.5 for row in lines(TOKENS))
    assert 0 < num_good < 10
    assert out(base, tmp_path / "s.parquet", where="reward >= 0.5").number == num_good
    examples = read_demonstrations(tmp_path / "s.parquet")
    assert examples.num_rows == num_good
    messages = json.loads(examples["task"][0].as_py())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert set(messages[0]) == {"role", "content"}
    assert pl.read_parquet(tmp_path / "s.parquet")["reward"].min() >= 0.5


def test_a_condition_chooses_rollouts(base, tmp_path):
    assert out(base, tmp_path / "a.jsonl", where="keep").number == 10
    assert out(base, tmp_path / "b.jsonl", form="verifiers", where="reward = 1.0 -- the best").number == 1
    assert lines(tmp_path / "b.jsonl")[0] in lines(TOKENS)
    for condition in ("true); drop table traces; --", "rewrd > 0"):
        with pytest.raises(ExportRefused, match=r"(?s)--where: the condition .* fails: .*\nNothing was written"):
            out(base, tmp_path / "c.jsonl", where=condition)
    import_files(ImportRequest([TOKENS], name="unfiltered", store=base.root.address))
    for run, condition in (("unfiltered", "keep"), ("base", "step = 5")):
        with pytest.raises(ExportRefused, match="nothing to export"):
            out(base, tmp_path / "c.jsonl", run=run, where=condition)
    assert not (tmp_path / "c.jsonl").exists()


def test_nothing_is_replaced_unless_asked(base, tmp_path, capsys):
    target = tmp_path / "t.jsonl"
    target.write_text("mine")
    with pytest.raises(OutputRefused, match="--force"):
        out(base, target, form="verifiers", force=False)
    argv = ["export", "base", "--format", "verifiers", "--to", str(target), "--store", base.root.address]
    assert cli.main(argv) == 2
    assert "is there already" in capsys.readouterr().err and target.read_text() == "mine"
    assert cli.main([*argv, "--force"]) == 0
    assert capsys.readouterr().out == f"{target}: 10 episodes\n"
    assert len(lines(target)) == 10 and list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    target, home = tmp_path / "t.jsonl", tmp_path / "home"
    home.mkdir()
    for mine in (target, home / "letters"):
        mine.write_text("mine")

    def fail(draft):
        draft.write_text("half")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        write_whole(target, fail, force=True)
    with pytest.raises(OutputRefused, match="something else than weights"):
        write_whole(home, lambda draft: draft.mkdir(), force=True)
    assert target.read_text() == (home / "letters").read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [home, target]


def test_weights_are_a_directory_without_the_optimizer(tmp_path):
    store, key = open_store(tmp_path / "store"), "k" * 32
    made = store.policies.scratch(key)
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json", SUMS_FILE):
        (made / name).write_text(name)
    store.policies.publish(made, key)
    copy_weights(store, key, tmp_path / "weights", force=False)
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(OutputRefused):
        copy_weights(store, key, tmp_path / "weights", force=False)
    copy_weights(store, key, tmp_path / "weights", force=True)
    assert len(list((tmp_path / "weights").iterdir())) == 3


def test_batches_that_were_scored_together_are_exported_once(store, tmp_path):
    more = write_lines(tmp_path / "more.jsonl", [sampled_trace("a", "x", 1.0), sampled_trace("b", "y", 0.0)])
    import_files(ImportRequest([more], name="more", store=store.root.address))
    context = context_of(store, "both")
    store.runs.record(run="both", event="started", kind="replay", config=context.config.model_dump(mode="json"))
    for run in ("base", "more"):
        for name in ("examples", "assignment", "rollout"):
            context.adopt(step_history(store, run).steps[0].work[name].entry, 0)
    perform(scoring(0.5), context, 0, (rollouts(store), rollouts(store, "more")))
    assert out(store, tmp_path / "a.jsonl", "both").number == 12
    assert rewards(tmp_path / "a.jsonl") == [0.5] * 12
    assert len({line["trace_id"] for line in lines(tmp_path / "a.jsonl")}) == 12


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
    argv += ["--store", store.root.address]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/b.jsonl: 7 samples",
        "left out: 3 rollouts in quarantine (--quarantined keeps them)",
    ]
    assert cli.main([*argv, "--force", "--quarantined"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/b.jsonl: 10 samples\n"

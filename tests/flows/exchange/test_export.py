"""Exporting: a run or a question as files, whole or not at all; and what was exported is imported as it was."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows import cli
from flows.exchange.export import ExportRefused, RolloutChoice, copy_weights, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from flows.reporting.output_files import OutputRefused, write_whole
from storage.store import open_store
from tasks.assignment.examples import read_demonstrations
from tasks.filtering import stage as filtering
from tasks.runtime.execute import perform
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import ref_of
from tests.flows.exchange.files import TOKENS, lines, rows, write_lines


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store with an imported run of ten rollouts in two groups, filtered."""
    from configs.run import RunConfig

    root = str(tmp_path_factory.mktemp("exporting") / "store")
    import_files(ImportRequest([TOKENS], name="theirs", store=root))
    store = open_store(root)
    config = RunConfig.model_validate(store.runs.config("theirs") | {"filtering": {"filters": [{"type": "errored"}]}})
    rollouts = ref_of(step_history(store, "theirs").steps[0].work["rollout"].entry, computed=False)
    perform(filtering.STAGE, RunContext(store, "theirs", config, {}), 0, (rollouts,))
    return root


def out(root: str, form: Any, target: Path, run: str = "theirs", force: bool = False, **choice: Any) -> int:
    """Export a run."""
    return export(form, target, RolloutChoice(run, **choice), store=root, force=force).number


def test_what_was_exported_is_imported_as_it_was(root, tmp_path):
    assert out(root, "verifiers", tmp_path / "t.jsonl") == 10
    assert lines(tmp_path / "t.jsonl") == lines(TOKENS)
    import_files(ImportRequest([tmp_path / "t.jsonl"], name="again", store=str(tmp_path / "store")))
    for table in ("traces", "messages"):
        assert rows(str(tmp_path / "store"), "again", table).equals(rows(root, "theirs", table))


def test_episodes_of_several_traces_or_none_come_back_as_they_were(tmp_path):
    pair, judged, broken, alone, *_ = lines(TOKENS)
    judge = judged["traces"][0] | {"agent": judged["traces"][0]["agent"] | {"name": "judge", "trainable": False}}
    error = {"type": "SandboxError", "message": "gone"}
    nothing = broken | {"ok": False, "errors": [error], "traces": []}
    by_itself = alone["traces"][0] | {"info": {"episode_id": "e", "env_name": "rev"}}
    given = [nothing, pair | {"traces": [*pair["traces"], judge]}, by_itself]
    write_lines(tmp_path / "t.jsonl", given)
    store = str(tmp_path / "store")
    outcome = import_files(ImportRequest([tmp_path / "t.jsonl"], name="run", store=store))
    assert outcome.figures["traces"] == 4
    assert out(store, "verifiers", tmp_path / "out.jsonl", run="run") == 3
    assert lines(tmp_path / "out.jsonl") == given
    out(store, "verifiers", tmp_path / "one.jsonl", run="run", where=f"trace_id = '{judge['id']}'")
    assert lines(tmp_path / "one.jsonl") == [given[1]], "an episode is exported whole"


def test_supervised_samples_feed_the_supervised_trainer(root, tmp_path):
    num_good = sum(row["traces"][0]["rewards"]["similarity"]["score"] >= 0.5 for row in lines(TOKENS))
    assert 0 < num_good < 10
    assert out(root, "sft", tmp_path / "s.parquet", where="reward >= 0.5") == num_good
    examples = read_demonstrations(tmp_path / "s.parquet")
    assert examples.num_rows == num_good
    messages = json.loads(examples["task"][0].as_py())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert set(messages[0]) == {"role", "content"}
    assert pl.read_parquet(tmp_path / "s.parquet")["reward"].min() >= 0.5


def test_preference_pairs_of_every_group(root, tmp_path):
    assert out(root, "preferences", tmp_path / "p.jsonl") == 2
    pairs = lines(tmp_path / "p.jsonl")
    assert [(pair["chosen_reward"], pair["rejected_reward"]) for pair in pairs] == [(1.0, 0.0), (0.75, 0.0)]
    assert all(pair["chosen"] != pair["rejected"] and pair["prompt"] for pair in pairs)
    out(root, "preferences", tmp_path / "p.parquet")
    assert pl.read_parquet(tmp_path / "p.parquet")["prompt"].to_list() == [pair["prompt"] for pair in pairs]


def test_a_condition_chooses_rollouts(root, tmp_path):
    assert out(root, "sft", tmp_path / "a.jsonl", where="keep") == 10
    assert out(root, "verifiers", tmp_path / "b.jsonl", where="reward = 1.0 -- the best") == 1
    assert lines(tmp_path / "b.jsonl")[0] in lines(TOKENS)
    for condition in ("true); drop table traces; --", "rewrd > 0"):
        with pytest.raises(ExportRefused, match=r"(?s)--where: the condition .* fails: .*\nNothing was written"):
            out(root, "sft", tmp_path / "c.jsonl", where=condition)
    import_files(ImportRequest([TOKENS], name="unfiltered", store=root))
    for run, condition in (("unfiltered", "keep"), ("theirs", "step = 5")):
        with pytest.raises(ExportRefused, match="nothing to export"):
            out(root, "sft", tmp_path / "c.jsonl", run=run, where=condition)
    assert not (tmp_path / "c.jsonl").exists()


def test_nothing_is_replaced_unless_asked(root, tmp_path):
    target = tmp_path / "t.jsonl"
    target.write_text("mine")
    with pytest.raises(OutputRefused, match="--force"):
        out(root, "verifiers", target)
    assert target.read_text() == "mine"
    assert out(root, "verifiers", target, force=True) == 10
    assert len(lines(target)) == 10 and list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    target, home = tmp_path / "t.jsonl", tmp_path / "home"
    home.mkdir()
    for mine in (target, home / "letters"):
        mine.write_text("mine")

    def fail(draft: Path) -> None:
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
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json"):
        (made / name).write_text(name)
    store.policies.publish(made, key)
    copy_weights(store, key, tmp_path / "weights", force=False)
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(OutputRefused):
        copy_weights(store, key, tmp_path / "weights", force=False)
    copy_weights(store, key, tmp_path / "weights", force=True)
    assert len(list((tmp_path / "weights").iterdir())) == 3


def test_the_command(root, tmp_path, capsys):
    target = tmp_path / "t.jsonl"
    argv = ["export", "theirs", "--format", "verifiers", "--to", str(target), "--store", root]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"{target}: 10 episodes\n"
    assert cli.main(argv) == 2
    assert "is there already" in capsys.readouterr().err

"""Importing: files become a run whose steps stand in the ledger like sampled ones; bad files leave nothing behind."""

from collections import Counter

import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows import cli
from flows.exchange.export import RolloutChoice, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from flows.runtime.resolve_run import resolve_run
from storage.read.frames import Frames
from storage.store import open_store
from tasks.advantage import stage as advantage
from tasks.advantage.stage import ImportedWithoutTokens
from tasks.exchange.episodes import ImportRefused
from tasks.filtering import stage as filtering
from tasks.inference.trace_rows.rows import rebuild
from tasks.learner.tiny import tiny_qwen3
from tasks.packing import stage as packing
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import perform, ref_of
from tests.fixtures.faults import happened
from tests.flows.exchange.files import RELAYED, TOKENS, lines, rows, sampled_trace, write_lines


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return str(tiny_qwen3(directory, hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16))


def bring(root, *files, name="theirs", **options):
    """Import files into a store."""
    return import_files(ImportRequest(list(files), name=name, store=str(root), **options))


def text(root, model, **options):
    """Import a file of text."""
    return bring(root, RELAYED, name="text", model=model, overrides=["model.renderer=qwen3"], **options)


def context_of(store, run, **sections):
    """Return where a run works, its config changed."""
    return RunContext(store, run, RunConfig.model_validate(store.runs.config(run) | sections), {})


def through(context, run):
    """Do the stages from filtering to packing over the recorded rollouts, as a replay does."""
    rollouts = ref_of(step_history(context.store, run).steps[0].work["rollout"].entry, computed=False)
    verdicts = perform(filtering.STAGE, context, 0, (rollouts,))
    credits = perform(advantage.STAGE, context, 0, (rollouts, verdicts))
    return perform(packing.STAGE, context, 0, (credits, rollouts))


FEW_FILTERS = {"filters": [{"type": "errored"}, {"type": "zero_advantage"}]}


def test_an_imported_step_stands_in_the_ledger_like_a_sampled_one(root):
    outcome = bring(root, TOKENS)
    assert (outcome.num_computed, outcome.num_steps) == (4, 1)
    assert outcome.figures == {"traces": 10, "with sampled tokens": 10}
    store = open_store(root)
    work = step_history(store, "theirs").steps[0].work
    stages = {"examples": "examples", "assignment": "assignment", "rollout": "import"}
    assert {name: entry.stage for name, entry in work.items()} == stages
    assert work["rollout"].inputs == {"assignment": work["assignment"].key, "examples": work["examples"].key}
    assert [event.event for event in store.runs.events("theirs")] == ["started", "finished"]
    config = store.runs.config("theirs")
    assert (config["kind"], config["steps"], config["model"]["path"]) == ("train", 1, "")
    assert [each["name"] for each in config["environments"]] == ["reverse_text"]


def test_imported_traces_can_be_trained_on_by_reinforcement_learning(root):
    bring(root, TOKENS)
    packed = through(context_of(open_store(root), "theirs", filtering=FEW_FILTERS), "theirs")
    batches = open_store(root).read(open_store(root).ledger.find(packed.key).slices("batches"))
    assert batches["rl_tokens"][0].as_py() > 0 and batches["ce_tokens"][0].as_py() == 0


def test_the_same_files_again_compute_nothing(root, tmp_path):
    bring(root, TOKENS)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(TOKENS.read_bytes())
    assert bring(root, copy).num_computed == 0
    assert bring(root, copy, name="other").num_computed == 0
    store = open_store(root)
    mine, theirs = (step_history(store, run).steps[0].work["rollout"] for run in ("other", "theirs"))
    assert mine.key == theirs.key and mine.slices == theirs.slices and "other" in mine.runs
    frames = Frames(store)
    other, first = (frames.run(run)["metrics"].drop("run").collect() for run in ("other", "theirs"))
    assert other.height > 0 and other.equals(first)
    assert bring(root, TOKENS, name="anew", environment="other").num_computed > 0, "another reading is other work"


def test_two_files_that_number_their_traces_share_none(root, tmp_path):
    for name in ("one", "other"):
        numbered = [sampled_trace(str(number), f"{name} {number}", 1.0) for number in range(2)]
        bring(root, write_lines(tmp_path / f"{name}.jsonl", numbered), name=name)
    one, other = ({*rows(root, name, "traces")["trace_id"].to_pylist()} for name in ("one", "other"))
    assert len(one) == len(other) == 2 and one.isdisjoint(other)


def test_an_import_that_was_interrupted_goes_on(root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tasks.exchange.trace_import.ImportedRollouts.rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bring(root, TOKENS)
    assert bring(root, TOKENS).num_computed == 2, "examples and assignments were safe"


@pytest.mark.fault("input", "a line of a file to import is cut", "the line is named, nothing written")
def test_one_bad_line_refuses_the_whole_file_unless_it_may_be_left_out(root, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    good = TOKENS.read_text().splitlines()
    bad.write_text("\n".join([*good[:2], good[2][:50], *good[3:]]) + "\n")
    assert cli.main(["import", str(bad), "--name", "theirs", "--store", str(root)]) == 2
    said = capsys.readouterr().err
    assert f"{bad}, line 3: the line is not JSON" in said and "Nothing was written" in said
    assert not root.exists()
    happened(said)
    assert cli.main(["import", str(bad), "--name", "theirs", "--store", str(root), "--skip-bad"]) == 0
    said = capsys.readouterr().out
    assert "9 traces" in said and "left out: 1 x the line is not JSON" in said


@pytest.mark.fault("input", "a file to import is empty or not there", "refused, nothing written")
def test_a_file_of_nothing_or_that_is_not_there_is_refused(root, tmp_path):
    for content in ("", "\n\n"):
        (tmp_path / "empty.jsonl").write_text(content)
        happened(repr(content))
        with pytest.raises(ImportRefused, match="no rollouts"):
            bring(root, tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="nothing was written"):
        bring(root, tmp_path / "absent.jsonl")


def test_the_name_of_an_import_is_no_other_s(root):
    bring(root, TOKENS)
    with pytest.raises(ImportRefused, match="run 'theirs' is in"):
        bring(root, RELAYED)
    with pytest.raises(ConfigError, match="stagecoach replay theirs --from filtering"):
        resolve_run("train", (), (), name="theirs", store=str(root))


@pytest.mark.engine
def test_text_is_rendered_refused_for_rl_and_trained_on_as_demonstrations(root, model):
    assert text(root, model).figures == {"traces": 4, "with rendered tokens": 4}
    store = open_store(root)
    with pytest.raises(ImportedWithoutTokens, match=r"algorithm\.type=supervised"):
        through(context_of(store, "text", filtering={"filters": [{"type": "errored"}]}), "text")
    supervised = {"algorithm": {"type": "supervised"}, "filtering": {"filters": [{"type": "errored"}]}}
    packed = through(context_of(store, "text", **supervised), "text")
    batches = store.read(store.ledger.find(packed.key).slices("batches"))
    assert batches["ce_tokens"][0].as_py() > 0 and batches["rl_tokens"][0].as_py() == 0
    row = rows(root, "text", "traces").to_pylist()[0]
    messages = [one for one in rows(root, "text", "messages").to_pylist() if one["trace_id"] == row["trace_id"]]
    trace = rebuild(row, messages)  # as for scoring
    assert trace["task"]["data"]["text"] in trace["nodes"][0]["message"]["content"]
    assert trace["rewards"]["similarity"]["score"] == row["reward"]
    with pytest.raises(ImportRefused, match="in another way"):  # another tokenizer is other work
        bring(root, RELAYED, name="text", model=model, overrides=["model.renderer=default"])


def test_the_groups_are_told(root, tmp_path, capsys):
    assert cli.main(["import", str(TOKENS), "--name", "theirs", "--store", str(root)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "2 groups: 2 of more than one rollout, 2 with differing rewards"
    rows = [sampled_trace(str(number), str(number), number) for number in range(3)]
    alone = write_lines(tmp_path / "alone.jsonl", rows)
    assert cli.main(["import", str(alone), "--store", str(root)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "3 groups: 0 of more than one rollout, 0 with differing rewards"
    assert "grpo" in said[2] and "leaves nothing to train on" in said[2]


def held_out_lines(target):
    """Write lines as an export with --held-out does: those of one example say that it is held out."""
    found = lines(TOKENS)
    last = found[-1]["task"]["data"]
    return write_lines(target, [line | ({"split": "eval"} if line["task"]["data"] == last else {}) for line in found])


def test_held_out_attempts_come_in_only_when_asked(root, tmp_path, capsys):
    held_out_lines(tmp_path / "own.jsonl")
    outcome = bring(root, tmp_path / "own.jsonl", name="own")
    assert outcome.figures["traces"] == 5 and list(outcome.left_out.values()) == [5]
    assert "held-out example" in next(iter(outcome.left_out))
    assert splits(root, "own") == {"train": 1}
    with pytest.raises(ImportRefused, match="in another way"):
        bring(root, tmp_path / "own.jsonl", name="own", held_out=True)
    argv = ["import", str(tmp_path / "own.jsonl"), "--name", "whole", "--store", str(root), "--held-out"]
    assert cli.main(argv) == 0
    assert "10 traces" in capsys.readouterr().out and splits(root, "whole") == {"train": 1, "eval": 1}
    target = tmp_path / "out.jsonl"
    for held_out, number in ((False, 5), (True, 10)):
        written = export("sft", target, RolloutChoice("whole", held_out=held_out), store=str(root), force=True)
        assert written.number == number


def splits(root, run):
    """Return how many examples of an imported run are of each split."""
    return dict(Counter(rows(root, run, "examples")["split"].to_pylist()))

"""What a replay is asked for and what it comes to: which stages, which steps, which name, and what is refused."""

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from configs.replay import replayed_stages
from flows import cli
from flows.queries.step_history import step_history
from storage.store import open_store
from tasks.stages import LINEAGE
from tests.fixtures import fixed
from tests.fixtures.commands import cases
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.fixtures.replays import RLOO, ask, pieces, quarantine, walk

STEPS = 3
NUM_GROUPS = SMALL["assignment"]["groups_per_step"]


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A store with a recorded run of three steps."""
    root = tmp_path_factory.mktemp("replay") / "store"
    rehearse(root, "base", steps=STEPS)
    return root


@cases(__file__, "steps")
def test_steps(origin, text, steps):
    config = ask(origin, from_stage="packing", steps=text)
    assert config.steps == len(steps)
    assert [piece.step for piece in pieces(config) if piece.stage == "packing"] == steps


@cases(__file__, "begins")
def test_the_first_stage_is_the_first_that_the_settings_reach(origin, overrides, first_stage):
    until = "assignment" if first_stage == "assignment" else "packing"
    asked = {"from_stage": "packing"} if not overrides else {}
    config = ask(origin, overrides=overrides, until=until, **asked)
    assert config.replay.from_stage == first_stage
    assert {piece.stage for piece in pieces(config)} - {"metrics"} == set(replayed_stages(config.replay))


@cases(__file__, "refused")
def test_what_cannot_be_is_refused_before_anything_starts(origin, asked, words):
    with pytest.raises(ConfigError, match=words) as refused:
        ask(origin, **asked)
    assert any("nothing" in note.lower() for note in [str(refused.value), *getattr(refused.value, "__notes__", [])])


def test_a_replay_without_a_name_has_one_that_it_has_again(origin):
    names = [ask(origin, overrides=overrides).name for overrides in ([RLOO], [RLOO], ["algorithm.normalise_std=true"])]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("base-advantage-")


def test_a_name_keeps_what_it_was_asked_for(tmp_path):
    rehearse(tmp_path / "store", "base", steps=2)
    begun = ask(tmp_path / "store", overrides=[RLOO], name="mine", steps="1:")
    walk(begun)
    again = ask(tmp_path / "store", run="", name="mine", until="")
    assert (again.replay, again.algorithm) == (begun.replay, begun.algorithm)
    with pytest.raises(ConfigError, match=r"algorithm\.type"):
        ask(tmp_path / "store", overrides=["algorithm.type=grpo"], name="mine", steps="1:")
    with pytest.raises(ConfigError, match=r"replay\.first_step"):
        ask(tmp_path / "store", overrides=[RLOO], name="mine", steps="0:")


def test_the_source_is_not_changed_and_its_rows_are_shared(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=2)
    before = (store.ledger.entries(run="base"), store.runs.events("base"))
    session, steps = walk(ask(tmp_path / "store", overrides=[RLOO], name="branch"))
    store = open_store(tmp_path / "store")
    assert (store.ledger.entries(run="base"), store.runs.events("base")) == before
    own = {e.stage: {piece.run for piece in e.outputs} for e in store.ledger.entries(run="branch") if e.outputs}
    assert own == {name: {"base"} for name in ("examples", "assignment", "rollout", "filtering")} | {
        name: {"branch"} for name in ("advantage", "packing", "metrics")
    }
    assert (session.num_computed, session.num_found) == (6, 0)
    assert [step["update"] for step in steps] == [None, None]
    assert store.runs.events("branch")[0].parent_run == "base"


def test_a_step_drawn_twice_is_replayed_from_the_batch_that_was_trained(tmp_path, monkeypatch):
    calls = []

    def narrow_at_first(assignments, policy, step):
        made = group(assignments, policy, step)
        calls.append(step)
        rewards = pa.array([0.5] * made["traces"].num_rows) if len(calls) <= NUM_GROUPS else made["traces"]["reward"]
        place = made["traces"].schema.get_field_index("reward")
        return made | {"traces": made["traces"].set_column(place, made["traces"].schema.field(place), rewards)}

    group = fixed.group
    monkeypatch.setattr(fixed, "group", narrow_at_first)
    store = rehearse(tmp_path / "store", "base", steps=1)
    assigned = [entry.inputs.get("batch") for entry in store.ledger.entries(run="base", stage="assignment")]
    assert assigned == [None, "1"], "the step was not drawn twice, so this shows nothing"
    work = step_history(store, "base").steps[0].work
    assert work["assignment"].inputs["batch"] == "1"
    assert work["packing"].key == work["training"].inputs["packing"]
    assert set(work) == {*LINEAGE} - {"regrade", "judging", "reference"}


def test_quarantined_rollouts_are_left_out_and_untouched_steps_are_found(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=3)
    names = quarantine(store, step=1, count=2)
    with pytest.raises(ConfigError, match="are in quarantine now"):
        ask(tmp_path / "store", from_stage="packing")
    config = ask(tmp_path / "store", name="clean")
    assert config.replay.from_stage == "filtering" and len(config.replay.quarantines) == 1
    walk(config)
    store = open_store(tmp_path / "store")
    made = {(e.stage, e.step) for e in store.ledger.entries(run="clean") if {p.run for p in e.outputs} == {"clean"}}
    ended = {("metrics", step) for step in range(3)}  # of steps that were not trained, unlike those of the source
    assert made - ended == {(stage, 1) for stage in ("filtering", "advantage", "packing")}, "only one step is touched"
    (verdicts,) = (e for e in store.ledger.entries(run="clean", stage="filtering") if e.step == 1)
    rows = store.read(verdicts.slices("verdicts")).to_pylist()
    assert {row["trace_id"] for row in rows if row["reason"] == "quarantined"} == set(names)
    (credits,) = (e for e in store.ledger.entries(run="clean", stage="advantage") if e.step == 1)
    assert not set(names) & set(store.read(credits.slices("samples"), ["trace_id"])["trace_id"].to_pylist())


def test_a_quarantine_of_later_does_not_change_a_replay_that_began(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=2)
    quarantine(store, step=0, count=1)
    begun = ask(tmp_path / "store", name="clean")
    walk(begun)
    quarantine(open_store(tmp_path / "store"), step=1, count=2)
    again = ask(tmp_path / "store", name="clean")
    assert again.replay.quarantines == begun.replay.quarantines
    assert not [piece for piece in pieces(again) if piece.computed]
    assert len(ask(tmp_path / "store", name="newer").replay.quarantines) == 2
    kept = ask(tmp_path / "store", name="kept", quarantine=False, from_stage="packing")
    assert kept.replay.quarantines == ()
    walk(kept)
    assert ask(tmp_path / "store", name="kept").replay == kept.replay, "nor one that kept them"


def test_an_empty_batch_is_not_trained_on_and_the_policy_goes_on(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=2)
    config = ask(tmp_path / "store", overrides=["filtering.filters.2.tolerance=9"], name="empty")
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"until": "training"})})
    _, steps = walk(config)
    assert [step["update"] for step in steps] == [None, None]
    trained = open_store(tmp_path / "store").ledger.entries(run="empty", stage="training")
    assert trained == [] and store.ledger.entries(run="base", stage="training")


@pytest.mark.parametrize("until", ["assignment", "filtering", "advantage"])
def test_a_replay_that_ends_early_describes_what_is_there(tmp_path, until, capsys):
    rehearse(tmp_path / "store", "base", steps=1)
    config = ask(tmp_path / "store", until=until, name="short")
    assert config.replay.from_stage == until, "no setting reaches a stage: the last one is done again"
    _, (step,) = walk(config)
    assert step["seconds"].keys() >= {until} and step["update"] is None and step["same_weights"] is None
    assert (step["reward"] is None) == (until == "assignment"), "assignments alone have no rewards"
    for argv in (["replay", "base", "--until", until, "--name", "short"], ["show", "short"], ["diff", "base", "short"]):
        assert cli.main([*argv, "--store", str(tmp_path / "store")]) == 0
    assert "replay short of base" in capsys.readouterr().out

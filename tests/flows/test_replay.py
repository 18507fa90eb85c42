"""What a replay is asked for and what it comes to: which stages, which steps, which name, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from configs.replay import ORDER, redone
from configs.run import RunConfig
from flows import replay_config, replay_outcome
from flows.foretell import foretell
from flows.policies import find_policy
from flows.processes.services import Supervisor
from flows.recorded import WAY, recorded_by
from flows.replay_config import prepare_replay
from flows.replay_outcome import Apart, finish_replayed
from flows.replay_request import Asked
from flows.replaying import quarantined_in, replay_steps
from flows.session import Session, recorded
from flows.views.differences import compare
from storage.policies import Policies
from storage.store import Store, open_store
from tasks.stage import Place, Policy, Ref
from tests.crash import fixed
from tests.flows.rehearsal import SMALL, SOURCE, Rehearsal, rehearse

RLOO = "advantage.type=rloo"
STEPS = 3
NUM_GROUPS = SMALL["assignment"]["groups_per_step"]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a recorded run of three steps."""
    root = tmp_path_factory.mktemp("replay") / "store"
    rehearse(root, "base", steps=STEPS)
    return root


def ask(root: Path, **asked: Any) -> RunConfig:
    return prepare_replay(Asked(**{"run": "base", "store": str(root), "until": "packing"} | asked))


def walk(config: RunConfig) -> tuple[Session, list[dict[str, Any]]]:
    """Go through a replay as its flow does, with a learner that is played; return what each step came to."""
    store = open_store(config.store)
    session = Session(
        Place(store, config.name, config, {}), SOURCE, Supervisor(config.name, Path(config.store) / "logs")
    )
    found, out = recorded_by(store, config.replay.run), quarantined_in(store, config.replay)
    with recorded(session):
        apart = Apart(store)
        steps = replay_steps(Rehearsal(session), SOURCE, config, found, out)
        return session, [finish_replayed(session, done, apart) for done in steps]


def pieces(config: RunConfig) -> list[Ref]:
    place = Place(open_store(config.store), config.name, config, {})
    return foretell(place, SOURCE, place)


@pytest.mark.parametrize(
    ("text", "steps"), [("", [0, 1, 2]), ("1", [1]), ("1:", [1, 2]), (":2", [0, 1]), ("1:2", [1]), ("0:3", [0, 1, 2])]
)
def test_steps(origin: Path, text: str, steps: list[int]) -> None:
    config = ask(origin, from_stage="packing", steps=text)
    assert config.steps == len(steps)
    assert [piece.step for piece in pieces(config)] == steps


@pytest.mark.parametrize("text", ["a", "1-2", "2:1", "1:1", ":", "1:2:3"])
def test_steps_that_say_nothing_sensible(origin: Path, text: str) -> None:
    if text == ":":
        assert ask(origin, from_stage="packing", steps=text).steps == STEPS
        return
    with pytest.raises(ConfigError, match="--steps"):
        ask(origin, from_stage="packing", steps=text)


@pytest.mark.parametrize(
    ("overrides", "begin"),
    [
        ([], "packing"),
        (["packing.tokens_per_row=96"], "packing"),
        ([RLOO], "advantage"),
        (["packing.tokens_per_row=96", "filtering.filters.1.enforce=true"], "filtering"),
        (["assignment.group_size=2"], "assignment"),
    ],
)
def test_the_first_stage_is_the_first_that_the_settings_reach(origin: Path, overrides: list[str], begin: str) -> None:
    until = "packing" if begin != "assignment" else "assignment"
    asked = {"from_stage": "packing"} if not overrides else {}
    config = ask(origin, overrides=overrides, until=until, **asked)
    assert config.replay.from_stage == begin
    assert {piece.stage for piece in pieces(config)} == set(redone(config.replay))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"run": "nobody"}, "there is no run 'nobody'"),
    ({"steps": "2:4", "from_stage": "packing"}, r"has not recorded step 3 .* it has the steps 0:3"),
    ({"steps": "7:", "from_stage": "packing"}, "has not recorded step 7"),
    (
        {"from_stage": "packing", "overrides": [RLOO]},
        "advantage.type: belongs to stage advantage.*use --from advantage",
    ),
    ({"from_stage": "packing", "until": "advantage"}, "--until advantage comes before --from packing"),
    ({"from_stage": "pakcing"}, "replay.from_stage"),
    ({"overrides": ["replay.run=other"]}, "said by options"),
    ({"overrides": ["store=elsewhere"]}, r"store: is said by options \(--store\)"),
    ({"overrides": ["steps=5"]}, r"steps: is said by options \(--steps\)"),
    ({"from_stage": "packing", "overrides": ["evaluation.every=1"]}, "evaluation.every: no stage of a replay reads it"),
    ({"until": "", "overrides": ["training.version=mine"]}, "versions are those of what is installed"),
    (
        {"from_stage": "rollout", "overrides": ["environments.0.holdout_fraction=0.5"]},
        "the examples are the recorded ones",
    ),
    ({"regrade": True, "from_stage": "assignment"}, "--regrade scores recorded rollouts before"),
    ({"overrides": ["packing.tokens=3"]}, "packing.tokens.*tokens_per_row"),
    ({"from_stage": "packing", "regrade": True}, "--regrade scores recorded rollouts before"),
    ({"name": "base", "from_stage": "packing"}, "'base' is a run of kind train"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[str(asked) for asked, _ in REFUSED])
def test_what_cannot_be_is_refused_before_anything_starts(origin: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        ask(origin, **asked)
    assert any("nothing" in note.lower() for note in [str(refused.value), *getattr(refused.value, "__notes__", [])])


def test_a_replay_without_a_name_has_one_that_it_has_again(origin: Path) -> None:
    names = [ask(origin, overrides=overrides).name for overrides in ([RLOO], [RLOO], ["advantage.normalise_std=true"])]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("base-advantage-")


def test_a_name_keeps_what_it_was_asked_for(tmp_path: Path) -> None:
    rehearse(tmp_path / "store", "base", steps=2)
    begun = ask(tmp_path / "store", overrides=[RLOO], name="mine", steps="1:")
    walk(begun)
    again = ask(tmp_path / "store", run="", name="mine", until="")
    assert (again.replay, again.advantage) == (begun.replay, begun.advantage)
    with pytest.raises(ConfigError, match="advantage"):
        ask(tmp_path / "store", overrides=["advantage.type=grpo"], name="mine", steps="1:")
    with pytest.raises(ConfigError, match=r"replay\.first_step"):
        ask(tmp_path / "store", overrides=[RLOO], name="mine", steps="0:")


def test_the_source_is_not_changed_and_its_rows_are_shared(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=2)
    before = (store.ledger.entries(run="base"), store.runs.events("base"))
    session, steps = walk(ask(tmp_path / "store", overrides=[RLOO], name="branch"))
    store = open_store(tmp_path / "store")
    assert (store.ledger.entries(run="base"), store.runs.events("base")) == before
    own = {e.stage: {piece.run for piece in e.outputs} for e in store.ledger.entries(run="branch") if e.outputs}
    assert own == {name: {"base"} for name in ("examples", "assignment", "rollout", "filtering")} | {
        name: {"branch"} for name in ("advantage", "packing")
    }
    assert (session.num_computed, session.num_found) == (4, 0)
    assert [step["update"] for step in steps] == [None, None]
    assert store.runs.events("branch")[0].parent_run == "base"


def test_a_step_drawn_twice_is_replayed_from_the_batch_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def narrow_at_first(assignments: list[dict[str, Any]], policy: dict[str, Any], step: int) -> fixed.Group:
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
    work = recorded_by(store, "base").steps[0].work
    assert work["assignment"].inputs["batch"] == "1"
    assert work["packing"].key == work["training"].inputs["packing"]
    assert set(work) == {*WAY} - {"regrade"}


def test_a_replay_of_some_steps_is_compared_over_those(tmp_path: Path) -> None:
    rehearse(tmp_path / "store", "base", steps=3)
    walk(ask(tmp_path / "store", overrides=[RLOO], steps="1:", name="late"))
    found = compare(open_store(tmp_path / "store"), "base", "late")
    assert found["parting"] == {"step": 1, "stage": "advantage", "state": "different key"}
    states = {(piece["step"], piece["stage"]): piece["state"] for piece in found["pieces"]}
    assert states[0, "rollout"] == "only in a" and states[1, "rollout"] == states[2, "filtering"] == "same key"


def quarantine(store: Store, step: int, count: int) -> list[str]:
    """Mark the first traces of a step of the base run as unfit."""
    (entry,) = (e for e in store.ledger.entries(run="base", stage="rollout") if e.step == step and not e.part)
    names = store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()[:count]
    store.quarantines.record(names, where="made up", reason="the verifier was broken", run="base")
    return names


def test_quarantined_rollouts_are_left_out_and_untouched_steps_are_found(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=3)
    names = quarantine(store, step=1, count=2)
    with pytest.raises(ConfigError, match="are in quarantine now"):
        ask(tmp_path / "store", from_stage="packing")
    config = ask(tmp_path / "store", name="clean")
    assert config.replay.from_stage == "filtering" and len(config.replay.quarantines) == 1
    walk(config)
    store = open_store(tmp_path / "store")
    made = {(e.stage, e.step) for e in store.ledger.entries(run="clean") if {p.run for p in e.outputs} == {"clean"}}
    assert made == {(stage, 1) for stage in ("filtering", "advantage", "packing")}, "only the touched step is new"
    (verdicts,) = (e for e in store.ledger.entries(run="clean", stage="filtering") if e.step == 1)
    rows = store.read(verdicts.slices("verdicts")).to_pylist()
    assert {row["trace_id"] for row in rows if row["reason"] == "quarantined"} == set(names)
    (credits,) = (e for e in store.ledger.entries(run="clean", stage="advantage") if e.step == 1)
    assert not set(names) & set(store.read(credits.slices("credits"), ["trace_id"])["trace_id"].to_pylist())


def test_a_quarantine_of_later_does_not_change_a_replay_that_began(tmp_path: Path) -> None:
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


def test_an_empty_batch_is_not_trained_on_and_the_policy_goes_on(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=2)
    config = ask(tmp_path / "store", overrides=["filtering.filters.2.tolerance=9"], name="empty")
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"until": "training"})})
    _, steps = walk(config)
    assert [step["update"] for step in steps] == [None, None]
    trained = open_store(tmp_path / "store").ledger.entries(run="empty", stage="training")
    assert trained == [] and store.ledger.entries(run="base", stage="training")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two directories of weights, and a store that has the weights of every policy."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 512, "name": name}))
        found.append(str(tmp_path / name))
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path / "a")
    monkeypatch.setattr(replay_config, "facts", lambda config: {})
    return found


def starts(store: Store, run: str) -> list[str]:
    """The keys of the policies that a run's trainings started from, by step."""
    return [entry.inputs["policy"] for entry in store.ledger.entries(run=run, stage="training")]


def trained(root: Path, **asked: Any) -> tuple[Store, list[dict[str, Any]]]:
    """Do a replay that trains; return the store and what each step came to."""
    _, steps = walk(ask(root, until="training", **asked))
    return open_store(root), steps


def test_other_weights_are_another_replay_whatever_they_are_called(tmp_path: Path, models: list[str]) -> None:
    rehearse(tmp_path / "store", "base", steps=2, model={"vocab_size": 512, "path": models[0]})
    path = [f"model.path={each}" for each in models]
    whole = {"until": "training", "from_stage": "training"}
    same, first, second = (ask(tmp_path / "store", overrides=each, **whole) for each in ([], path[:1], path[1:]))
    assert same.replay.weights == "" and first.replay.weights != second.replay.weights
    assert len({same.name, first.name, second.name}) == 3
    walk(first.model_copy(update={"name": "mine"}))
    with pytest.raises(ConfigError, match=r"replay\.weights"):
        ask(tmp_path / "store", until="training", name="mine", overrides=path[1:])


def test_a_replay_of_a_replay_from_other_weights_goes_on_from_its_policies(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=3)
    store, _ = trained(root, from_stage="training", overrides=[f"model.path={models[1]}"], name="fresh")
    made = [entry.key for entry in store.ledger.entries(run="fresh", stage="training")]
    store, steps = trained(root, run="fresh", from_stage="training", steps="1:", name="again")
    assert starts(store, "again") == made[:2] and [step["same_weights"] for step in steps] == [True, True]
    store, steps = trained(root, run="fresh", steps="1:", overrides=["training.learning_rate=0.5"], name="faster")
    assert starts(store, "faster")[0] == made[0] and [step["updates_apart"] for step in steps] == [0, 1]


def test_policies_that_counterfactual_steps_start_from_are_not_their_own(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=3)
    trained(root, overrides=["training.learning_rate=0.5"], name="first")
    trained(root, overrides=["training.learning_rate=0.25"], name="second")
    store, _ = trained(
        root, run="second", policies="recorded", overrides=["training.learning_rate=0.5"], name="what-if"
    )
    entries = store.ledger.entries(run="what-if", stage="training")
    assert [entry.step for entry in entries] == [0, 1, 2]
    own = [past.work["training"].key for past in recorded_by(store, "what-if").steps.values()]
    assert own == [entry.key for entry in entries]
    assert find_policy(store, "what-if:1") == Policy(entries[0].key, 1)
    began = [past.policy.key for past in recorded_by(store, "what-if").steps.values() if past.policy]
    assert began == starts(store, "second"), "a replay of it would start from the same"


def test_a_step_emptied_by_a_quarantine_stays_empty_in_replays_of_the_replay(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    store = rehearse(root, "base", steps=3)
    names = quarantine(store, step=1, count=12)
    store, steps = trained(root, policies="recorded", overrides=["training.learning_rate=0.5"], name="clean")
    assert steps[1]["update"] is None
    for asked in (
        {"from_stage": "training"},
        {"from_stage": "training", "quarantine": False},
        {"from_stage": "filtering"},
    ):
        store, steps = trained(root, run="clean", name=f"again-{len(asked)}-{asked['from_stage']}", **asked)
        assert [step["update"] is None for step in steps] == [False, True, False], asked
        packed = store.ledger.entries(run=f"again-{len(asked)}-{asked['from_stage']}", stage="packing")
        rows = [
            row for e in packed for row in store.read(e.slices("batches"), ["sample_ids"])["sample_ids"].to_pylist()
        ]
        assert rows and not {sample.rpartition("/")[0] for row in rows for sample in row} & set(names)
    assert [entry.step for entry in store.ledger.entries(run="clean", stage="training")] == [0, 2]
    versions = [
        store.read(e.slices("updates"))["version"][0].as_py()
        for e in store.ledger.entries(run="clean", stage="training")
    ]
    assert versions == [1, 3]


def test_rollouts_of_a_replay_that_are_found_again_are_left_out_when_unfit(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=1)
    hot = {"from_stage": "rollout", "overrides": ["rollout.temperature=0.5"]}
    store, _ = trained(root, name="hot", **hot)
    (entry,) = (e for e in store.ledger.entries(run="hot", stage="rollout") if not e.part)
    names = store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()[:2]
    store.quarantines.record(names, where="made up", reason="broken", run="hot")
    hot["overrides"] = [*hot["overrides"], RLOO]
    store, _ = trained(root, name="hotter", **hot)
    (verdicts,) = store.ledger.entries(run="hotter", stage="filtering")
    rows = store.read(verdicts.slices("verdicts")).to_pylist()
    assert {row["trace_id"] for row in rows if row["reason"] == "quarantined"} == set(names)


def test_a_quarantine_elsewhere_or_heeded_before_stops_nothing(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    quarantine(rehearse(root, "base", steps=2), step=0, count=1)
    assert ask(root, from_stage="packing", steps="1:").replay.from_stage == "packing"
    trained(root, name="clean")
    assert ask(root, run="clean", from_stage="packing").replay.quarantines
    with pytest.raises(ConfigError, match="--no-quarantine: 'clean' began without"):
        ask(root, name="clean", quarantine=False)


@pytest.mark.parametrize("lag", [0, 1])
def test_unchanged_settings_find_everything_from_every_stage(tmp_path: Path, models: list[str], lag: int) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=3, rollout={"max_off_policy_steps": lag})
    for stage in ORDER:
        config = ask(root, until="training", from_stage=stage)
        assert not [piece for piece in pieces(config) if piece.computed], stage
        _, steps = walk(config)
        assert all(step["same_weights"] for step in steps)
        assert [step["updates_apart"] for step in steps] == [0, lag, lag]


def test_other_examples_are_listed_again_and_assigned(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=1)
    config = ask(root, from_stage="assignment", until="assignment", overrides=["environments.0.holdout_fraction=0.5"])
    assert [piece.stage for piece in pieces(config) if piece.computed] == ["examples", "assignment"]


def test_leaving_the_trust_region_is_said_once(
    tmp_path: Path, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=3)
    measured = replay_outcome.describe
    masked = iter([0.1, 0.11, 0.5])

    def far(*arguments: Any) -> dict[str, Any]:
        found = measured(*arguments)
        return found | {"update": found["update"] | {"masked_fraction": next(masked)}}

    monkeypatch.setattr(replay_outcome, "describe", far)
    notes: list[str] = []
    monkeypatch.setattr(
        Session, "tell", lambda self, event, **facts: notes.append(facts["text"]) if event == "note" else None
    )
    trained(root, overrides=["training.learning_rate=0.5"], name="far")
    (said,) = notes
    assert said.startswith(
        "step 1: 11% of the tokens are outside the trust region (recorded: 0%); the policy is 1 update away"
    )


def test_weights_are_not_asked_for_where_nothing_is_trained(tmp_path: Path, models: list[str]) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=1)
    with pytest.raises(ConfigError, match=r"model\.path: no weights are needed"):
        ask(root, from_stage="packing", until="packing", overrides=[f"model.path={models[1]}"])

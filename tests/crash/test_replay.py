"""Replays of a recorded run: what is found, what is computed again, and that the same comes out."""

import os
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from storage.store import Store, open_store
from tests.fixtures.driving import NAME, ROOT, Driven, check_once, side_by_side, weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ORDER = ("filtering", "advantage", "packing", "training")
CHANGES = {
    "filtering": "filtering.filters.1.enforce=true",
    "advantage": "algorithm.type=rloo",
    "packing": "packing.tokens_per_row=96",
    "training": "training.learning_rate=1e-4",
}
OTHERS = {"faster": "training.learning_rate=1e-4", "muon": "training.optimizer.type=muon"}
"""Settings to go on with; the second keeps another state, so it goes on from the weights alone."""
# Modules that a replay without sampling has no use for, and a network that is not there.
OFFLINE = """
import socket, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "verifiers", "renderers"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Refused())
connect = socket.socket.connect
def local(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError(f"no network: {address}")
    return connect(self, address)
socket.socket.connect = local
look_up = socket.getaddrinfo
def known(host, *arguments, **settings):
    if host not in ("127.0.0.1", "localhost", "::1", None):
        raise OSError(f"no names: {host}")
    return look_up(host, *arguments, **settings)
socket.getaddrinfo = known
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A directory whose sitecustomize takes engine, environments and network from every process."""
    directory = tmp_path_factory.mktemp("offline")
    (directory / "sitecustomize.py").write_text(OFFLINE)
    return directory


@pytest.fixture(scope="module")
def source(uninterrupted, tmp_path_factory):
    """A copy of the uninterrupted run."""
    directory = tmp_path_factory.mktemp("replay")
    shutil.copytree(uninterrupted.store, directory / "store")
    return Driven(directory, uninterrupted.overrides)


def computed_by(store: Store, run: str) -> set[tuple[str, int]]:
    """Return the stages and steps whose rows a run computed itself."""
    entries = store.ledger.entries(run=run)
    return {(e.stage, e.step) for e in entries if not e.part and {piece.run for piece in e.outputs} == {run}}


def steps_of(stage: str) -> set[tuple[str, int]]:
    """Return a stage and what comes after it, at both steps."""
    return {(each, step) for each in (*ORDER[ORDER.index(stage) :], "metrics") for step in (0, 1)}


def last_weights(store: Store, run: str) -> list[str]:
    """Return the weights that a run trained, in order of steps."""
    trained = [entry for entry in store.ledger.entries(run=run, stage="training")]
    return [store.read(entry.slices("policies"))["weights_sha256"][0].as_py() for entry in trained]


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("import vllm", "vllm is not to be had here"),
        ("import socket; socket.create_connection(('localhost.invalid', 80), 1)", "no names: localhost.invalid"),
        ("import socket; socket.socket().connect(('192.0.2.1', 80))", "no network: ('192.0.2.1', 80)"),
    ],
)
def test_offline_means_offline(offline, statement, refusal):
    environment = os.environ | {"PYTHONPATH": f"{offline}:{ROOT}"}
    done = subprocess.run([sys.executable, "-P", "-c", statement], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and refusal in done.stderr


@pytest.mark.essential
def test_unchanged_settings_find_everything_and_start_nothing(source, offline):
    logs = sorted((source.store / "logs").rglob("*"))
    replays = [{"run": NAME, "from_stage": stage, "name": f"same-{stage}"} for stage in ORDER]
    life = source.live(replays=replays, path=offline)
    assert life.status == 0, life.output
    assert life.sampled == () and not [moment for moment in life.moments if " append " in moment]
    assert sorted(path for path in (source.store / "logs").rglob("*") if path.is_file()) == [
        path for path in logs if path.is_file()
    ], "a service was started"
    store = open_store(source.store)
    for stage, outcome in zip(ORDER, source.outcome, strict=True):
        assert (outcome["num_computed"], outcome["num_found"]) == (0, len(steps_of(stage)))
        assert all(step["same_weights"] for step in outcome["steps"]) and len(outcome["steps"]) == 2
        assert computed_by(store, f"same-{stage}") == set()
        assert last_weights(store, f"same-{stage}") == last_weights(store, NAME)
        assert store.runs.events(f"same-{stage}")[-1].parent_run == NAME


def test_a_changed_setting_computes_exactly_its_descendants(source, offline):
    before = weights(open_store(source.store))
    replays = [{"run": NAME, "overrides": [CHANGES[stage]], "name": f"other-{stage}"} for stage in ORDER]
    life = source.live(replays=replays, path=offline)
    assert life.status == 0, life.output
    assert life.sampled == ()
    store = open_store(source.store)
    for stage, outcome in zip(ORDER, source.outcome, strict=True):
        assert outcome["num_computed"] == len(steps_of(stage)) and outcome["num_found"] == 0
        assert computed_by(store, f"other-{stage}") == steps_of(stage), stage
    recorded = last_weights(store, NAME)
    # Nothing is truncated here, so another filtering section gives the same batches: trained again, the same weights.
    assert last_weights(store, "other-filtering") == recorded
    assert [step["same_weights"] for step in source.outcome[0]["steps"]] == [True, True]
    for stage in ("advantage", "packing", "training"):
        assert last_weights(store, f"other-{stage}")[0] != recorded[0]
    assert weights(store) == before, "the source run was changed"


@pytest.mark.essential
def test_a_replay_is_resumed_and_replayed_itself(source):
    asked = {"run": NAME, "overrides": ["algorithm.normalise_std=true"], "name": "once"}
    killed = source.live("before commit training 1", replays=[asked])
    assert killed.status == -9, killed.output
    life = source.live(replays=[asked, asked, {"run": "once", "from_stage": "packing", "name": "twice"}])
    assert life.status == 0, life.output
    resumed, again, of_replay = source.outcome
    assert (resumed["num_computed"], resumed["num_found"]) == (2, 6)
    assert (again["num_computed"], again["num_found"]) == (0, 8)
    assert (of_replay["num_computed"], of_replay["num_found"]) == (0, 6)
    store = open_store(source.store)
    assert last_weights(store, "twice") == last_weights(store, "once") != last_weights(store, NAME)


@pytest.mark.parametrize(("moment", "epsilon"), [("before commit of several", 1e-3), ("after commit of several", 2e-3)])
def test_quick_stages_become_visible_together_or_not_at_all(source, moment, epsilon):
    name = moment.replace(" ", "-")
    asked = {"run": NAME, "until": "packing", "overrides": [f"algorithm.epsilon={epsilon}"], "name": name}
    killed = source.live(moment, replays=[asked])
    assert killed.status == -9, killed.output
    before = computed_by(open_store(source.store), name)
    whole = {(stage, step) for stage in ("advantage", "packing", "metrics") for step in (0, 1)}
    assert before == (whole if moment.startswith("after") else set())
    life = source.live(replays=[asked])
    assert life.status == 0, life.output
    assert source.outcome[0]["num_computed"] == len(whole - before)
    check_once(source.store)


@pytest.mark.nightly
def test_counterfactual_steps_each_start_from_the_recorded_policy(source):
    asked: dict[str, Any] = {"run": NAME, "overrides": ["training.max_grad_norm=0.01"], "name": "what-if"}
    life = source.live(replays=[asked | {"policies": "recorded"}, asked | {"name": "along"}])
    assert life.status == 0, life.output
    store = open_store(source.store)
    recorded, what_if, along = (store.ledger.entries(run=run, stage="training") for run in (NAME, "what-if", "along"))
    made = [entry for entry in what_if if entry.run in {piece.run for piece in entry.outputs}]
    assert [entry.inputs["policy"] for entry in made] == [entry.inputs["policy"] for entry in recorded]
    assert along[0].key == made[0].key, "the first step is the same counterfactual"
    assert [entry.inputs["policy"] for entry in along] == [recorded[0].inputs["policy"], along[0].key]
    assert len(what_if) == 2, "the policies that the steps started from are not work of this run"
    assert source.outcome[0]["steps"][0]["update"]["weights_sha256"] == last_weights(store, "along")[0]


def test_batches_alone_need_no_learner(source, offline):
    asked = {"run": NAME, "steps": "1", "until": "packing", "overrides": ["algorithm.type=rloo"], "name": "batches"}
    life = source.live(replays=[asked], path=offline)
    assert life.status == 0, life.output
    store = open_store(source.store)
    assert {stage for stage, _ in computed_by(store, "batches")} <= {"advantage", "packing", "metrics"}
    assert not (source.store / "logs" / "batches" / "learner.log").exists()
    assert [step["step"] for step in source.outcome[0]["steps"]] == [1]
    assert source.outcome[0]["steps"][0]["update"] is None


@pytest.mark.nightly
def test_other_settings_go_on_from_a_policy_whose_state_was_not_saved(drive):
    """The recorded batches in between are trained with the settings that they had, or the weights would differ."""
    rare, often = drive("steps=3", "training.save_optimizer_every=9"), drive("steps=3")
    assert [life.status for life in side_by_side(rare.live, often.live)] == [0, 0]
    for run in (rare, often):
        states = [
            (run.store / "policies" / e.key / "optimizer.safetensors").exists()
            for e in open_store(run.store).ledger.entries(run=NAME, stage="training")
        ]
        assert states == [run is often] * 3, "the one has no state to go on from, the other has"
    asked = [{"run": NAME, "steps": "2:3", "overrides": [each], "name": name} for name, each in OTHERS.items()]
    for life in side_by_side(*(partial(run.live, replays=asked) for run in (rare, often))):
        assert life.status == 0, life.output
    outcomes = [[each["steps"][0]["update"]["weights_sha256"] for each in run.outcome] for run in (rare, often)]
    assert outcomes[0] == outcomes[1]
    assert len({*outcomes[0], last_weights(open_store(rare.store), NAME)[2]}) == 1 + len(OTHERS)

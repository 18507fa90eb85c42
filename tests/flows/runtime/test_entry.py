"""What flow runs are called: as somebody has typed, or so that they can be told apart."""

import re
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from prefect._internal.uuid7 import uuid7

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.orchestration import run_flow
from flows.orchestration.run_flow import flow_run_name, run_name
from flows.orchestration.states import RunCancelled
from flows.runtime import demo_sources, entry, run
from flows.runtime.session import Session
from flows.train import train
from storage.store import open_store
from tests.fixtures.histories import begun


@pytest.fixture
def within(monkeypatch):
    """Let the code under test believe that it is called in a flow run of the deployment `nightly`."""

    def begin(flow_run_id, name="cunning-falcon", parameters=None, **record):
        at = datetime(2026, 11, 29, 3, 0, tzinfo=timezone(timedelta(hours=2)))
        runtime = SimpleNamespace(name=name, parameters=parameters, scheduled_start_time=at)
        monkeypatch.setattr(run_flow, "flow_run", runtime)
        monkeypatch.setattr(run_flow, "deployment", SimpleNamespace(name="nightly"))
        for module in (entry, run_flow):
            monkeypatch.setattr(module, "current_flow_run", lambda: flow_run_id)
        context = SimpleNamespace(flow_run=SimpleNamespace(**{"deployment_id": "d", "auto_scheduled": False} | record))
        monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: context)

    return begin


def test_flow_runs_of_one_batch_of_a_schedule_have_runs_of_their_own(within):
    ids = [str(uuid7(ms=1795921200000 + number)) for number in range(60)]
    assert len({each[:8] for each in ids}) == 1
    names = []
    for each in (*ids, ids[0]):
        within(each)
        names.append(run_name("train"))
    assert len(set(names)) == 60 and names[0] == names[-1], "a retry has the name of its first attempt"
    assert re.fullmatch(r"train-nightly-20261129-0100-[0-9a-f]{8}", names[0])


def test_a_run_of_another_flow_run_is_not_taken_up(within, root):
    within("mine")
    config = RunConfig(name=run_name("train"), store=str(root))
    entry._require_own(config)
    begun(config, flow_run="other")
    with pytest.raises(ConfigError, match=f"{config.name}.* was made by another flow run, other"):
        entry._require_own(config)
    open_store(config.store).runs.record(run=config.name, event="resumed", flow_run="mine")
    entry._require_own(config)


@pytest.mark.parametrize(
    ("typed", "parameter", "value", "record", "name"),
    [
        ("cunning-falcon", "name", "demo", {"auto_scheduled": True}, "train-demo"),
        ("cunning-falcon", "name", "demo", {"deployment_id": None}, "train-demo"),
        ("blue-falcon", "name", "demo", {}, "blue-falcon train-demo"),
        ("blue-falcon train-demo", "name", "demo", {}, "blue-falcon train-demo"),
        ("higher rate", "name", "train-demo", {}, "higher rate train-demo"),
        ("higher rate", "continue_run", "demo", {}, "higher rate train-demo"),
    ],
)
def test_a_typed_name_stays(within, typed, parameter, value, record, name):
    within("id", typed, {parameter: value}, **record)
    assert flow_run_name("train")() == name


@pytest.mark.parametrize(
    ("kind", "parameters", "name"),
    [
        ("replay", {"name": "", "run": "demo"}, "replay-demo"),
        ("replay", {"name": "again", "run": "demo"}, "replay-again"),
        ("maintain", {"keep_last": 1}, "maintain-20261129-0100"),
    ],
)
def test_replays_and_maintenance_are_not_named_after_a_run_that_does_not_exist(within, kind, parameters, name):
    within("id", parameters=parameters, auto_scheduled=True)
    assert flow_run_name(kind)() == name


def test_records_of_logs_name_the_flow_and_its_run(monkeypatch):
    record = SimpleNamespace(id="its id", name="cunning-falcon", deployment_id=None)
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: SimpleNamespace(flow_run=record, flow=train))
    extra = run.flow_logger().extra
    assert (extra["flow_name"], extra["flow_run_name"]) == ("train", "cunning-falcon")


def test_a_run_that_is_cancelled_while_it_waits_for_the_gpu_writes_no_event(monkeypatch, root):
    """Another flow run may train the run of the same name meanwhile, and its state is of that one."""
    config = RunConfig(name="a", store=str(root))
    store = open_store(config.store)
    begun(config, flow_run="first")

    def cancelled(*_):
        raise RunCancelled("cancelled while it waited for a GPU slot")

    monkeypatch.setattr(Session, "begin", cancelled)
    monkeypatch.setattr(run, "current_flow_run", lambda: "second")
    with pytest.raises(RunCancelled), entry.session_of(config, lambda *_: []):
        pass
    assert [event.event for event in store.runs.events("a")] == ["started"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"name": "a b/c"}, "a b/c"),
        ({"overrides": ["training.lerning_rate=1"]}, "lerning_rate"),
        ({"continue_run": "a", "steps": 1}, "run 'a' keeps its recorded config; leave out presets"),
        ({"continue_run": "a", "presets": [], "model": ""}, "has no run 'a' of kind train"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_demo_s_model_is_made(monkeypatch, root, wrong, message):
    monkeypatch.setattr(demo_sources, "build", pytest.fail)
    parameters = {"presets": ["demo"], "model": "demo", "advanced": {"store": str(root)}}
    state = train.fn(**{**parameters, **wrong})
    with pytest.raises(ConfigError, match=re.escape(message)):
        state.result()

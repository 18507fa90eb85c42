"""What is looked for before a run starts: environments of new runs are asked, those of recorded runs are not."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from flows.runtime.loop import plan_work
from flows.runtime.preflight import preflight
from flows.services import engine as engine_service
from flows.services.pools import TOKEN
from flows.services.process import ServiceFailed
from storage.records import REMOVED
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tests.fixtures import builders, fixed
from tests.fixtures.builders import example, table
from tests.fixtures.rehearsal import SOURCE, die, notes_of, session_for

ONE = {"agent": True}


def checked(session, seats=ONE, needs_nothing=True):
    """Do the preflight of a session; return how often its environment, of these seats, was asked, and the notes."""
    calls, notes = [], notes_of(session)
    held_out = table("examples", [example("held-out", fixed.ENVIRONMENT, "eval")])
    examples = pa.concat_tables([fixed.examples(), held_out])

    def load():
        calls.append(None)
        facts = EnvironmentFacts(seats, scores=True)
        empty = LoadedEnvironment(examples.slice(0, 0), facts)
        return {fixed.ENVIRONMENT: LoadedEnvironment(examples, facts), "empty": empty}

    session.environments.load = load
    session.source = replace(SOURCE, weights=str(builders.model(Path(session.config.store).parent / "model")))
    if needs_nothing:
        session.needed_services = lambda missing: []
    preflight(session, [ref for ref in plan_work(session.context, SOURCE, None) if ref.computed])
    return len(calls), notes


def test_an_environment_whose_seats_do_not_fit_is_refused_before_anything_starts(root):
    with pytest.raises(ConfigError, match="trains 2 seats") as refused:
        checked(session_for(root, "run"), {"left": True, "right": True})
    assert "nothing was started" in str(refused.value)


def test_an_environment_without_examples_that_is_to_be_evaluated_is_refused(root):
    empty = {"environments": [{"name": "empty", "taskset": {"id": "t"}}], "every": 1}
    says = r"evaluation\.environments\.0: environment 'empty' has 0 examples .*is empty"
    with pytest.raises(ConfigError, match=says):
        checked(session_for(root, "run", evaluation=empty))


def test_a_recorded_run_is_not_checked_again_and_a_new_one_is(root):
    store = die(root, "before", 3, steps=2).context.store
    assert [checked(session_for(root, name, steps=2))[0] for name in ("before", "again")] == [0, 1]
    store.runs.record(run="before", event=REMOVED)
    assert checked(session_for(root, "before", steps=2))[0] == 1


def test_services_on_pools_need_a_server_of_prefect(root, monkeypatch):
    monkeypatch.setattr("flows.runtime.preflight.required_url", lambda why: pytest.fail(why))
    monkeypatch.setenv(TOKEN, "of these machines")
    session = session_for(root, "run", placement={"services": "pools"})
    session.needed_services = lambda missing: [SimpleNamespace(deployment="serve/engine", check_available=pytest.fail)]
    with pytest.raises(pytest.fail.Exception, match=r"placement\.services is pools"):
        checked(session, needs_nothing=False)


def test_a_machine_without_an_engine_says_so(root, monkeypatch):
    monkeypatch.setattr(engine_service, "engine_version", lambda: "")
    with pytest.raises(ServiceFailed, match="no inference engine is installed") as refused:
        checked(session_for(root, "run"), needs_nothing=False)
    assert "Nothing was started" in str(refused.value)

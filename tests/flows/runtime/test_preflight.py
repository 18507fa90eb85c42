"""What is looked for before a run starts: environments of new runs are asked, those of recorded runs are not."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from flows.runtime.plan import plan_work
from flows.runtime.preflight import preflight
from flows.runtime.session import Session
from flows.services import engine as engine_service
from flows.services.process import ServiceFailed
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tests.fixtures import builders, fixed
from tests.fixtures.builders import example, table
from tests.fixtures.rehearsal import SOURCE, notes_of, rehearse, session_for

ONE = {"agent": True}


def checked(session: Session, seats: dict[str, bool] = ONE, needs_nothing: bool = True) -> tuple[int, list[str]]:
    """Do the preflight of a session; return how often its environment, of these seats, was asked, and the notes."""
    calls, notes = list[None](), notes_of(session)
    held_out = table("examples", [example("held-out", fixed.ENVIRONMENT, "eval")])
    examples = pa.concat_tables([fixed.examples(), held_out])

    def load() -> dict[str, LoadedEnvironment]:
        calls.append(None)
        return {fixed.ENVIRONMENT: LoadedEnvironment(examples, EnvironmentFacts(seats, scores=True))}

    session.environments.load = load  # type: ignore[method-assign]
    session.source = replace(SOURCE, weights=str(builders.model(Path(session.config.store).parent / "model")))
    if needs_nothing:
        session.needed_services = lambda missing: []  # type: ignore[method-assign]
    preflight(session, [ref for ref in plan_work(session.context, SOURCE, None) if ref.computed])
    return len(calls), notes


def test_an_environment_whose_seats_do_not_fit_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="trains 2 seats") as refused:
        checked(session_for(tmp_path / "store", "run"), {"left": True, "right": True})
    assert "nothing was started" in str(refused.value)


def test_a_recorded_run_is_not_checked_again_and_a_new_one_is(tmp_path):
    root = tmp_path / "store"
    rehearse(root, "before", steps=1)
    assert [checked(session_for(root, name, steps=2))[0] for name in ("before", "again")] == [0, 1]


def test_a_machine_without_an_engine_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_service, "engine_version", lambda: "")
    with pytest.raises(ServiceFailed, match="no inference engine is installed") as refused:
        checked(session_for(tmp_path / "store", "run"), needs_nothing=False)
    assert "Nothing was started" in str(refused.value)

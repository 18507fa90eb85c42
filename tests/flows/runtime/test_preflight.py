"""What is looked for before a run starts: environments are asked once, and only where nobody asked them alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.fixtures.rehearsal import SOURCE, rehearse, session_for


def asked(session: Session, seats: dict[str, bool], needs_nothing: bool = True) -> int:
    """Do the preflight of a session whose environment has these seats; return how often it was asked."""
    calls: list[None] = []
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
    return len(calls)


def test_an_environment_whose_seats_do_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains 2 seats") as refused:
        asked(session_for(tmp_path / "store", "run"), {"left": True, "right": True})
    assert "nothing was started" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"steps": 3}, 0),
        ({"seed": 8}, 0),
        ({"algorithm": {"type": "rloo"}}, 1),
        ({"evaluation": {"every": 1, "num_examples": 1}}, 1),
    ],
)
def test_what_a_run_of_the_store_was_asked_is_not_asked_again(
    tmp_path: Path, changes: dict[str, Any], count: int
) -> None:
    root = tmp_path / "store"
    rehearse(root, "before", steps=1)
    assert asked(session_for(root, "again", **changes), {"agent": True}) == count


def test_a_machine_without_an_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "engine_version", lambda: "")
    with pytest.raises(ServiceFailed, match="no inference engine is installed") as refused:
        asked(session_for(tmp_path / "store", "run"), {"agent": True}, needs_nothing=False)
    assert "Nothing was started" in str(refused.value)

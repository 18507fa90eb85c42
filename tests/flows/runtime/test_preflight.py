"""What is looked for before a run starts: environments are asked once, and only where nobody asked them alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from flows.runtime.plan import plan_work
from flows.runtime.preflight import edits_since, preflight
from flows.runtime.session import Session
from flows.services import engine as engine_service
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.runtime.run_context import RunContext
from tests.fixtures import builders, fixed, replays
from tests.fixtures.builders import example, table
from tests.fixtures.rehearsal import SMALL, SOURCE, notes_of, rehearse, session_for

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


def test_an_environment_whose_seats_do_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains 2 seats") as refused:
        checked(session_for(tmp_path / "store", "run"), {"left": True, "right": True})
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
    assert checked(session_for(root, "again", **changes))[0] == count


def test_a_machine_without_an_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "engine_version", lambda: "")
    with pytest.raises(ServiceFailed, match="no inference engine is installed") as refused:
        checked(session_for(tmp_path / "store", "run"), needs_nothing=False)
    assert "Nothing was started" in str(refused.value)


def with_version(version: str, **changes: Any) -> dict[str, Any]:
    environments = ({**SMALL["environments"][0], "version": version},)
    return {"environments": environments, **changes}


def told(root: Path, name: str, version: str, **changes: Any) -> list[str]:
    """Return the notes of a run's preflight."""
    return checked(session_for(root, name, **with_version(version, **changes)))[1]


def test_a_new_run_says_what_is_computed_anew_and_how_to_keep_rollouts(tmp_path: Path) -> None:
    root = tmp_path / "store"
    rehearse(root, "before", steps=1, **with_version("game 1 sha256:aa, verifiers 0.4.0"))
    (line,) = told(root, "after", "game 1 sha256:bb, verifiers 0.4.0")
    assert "other code than in run 'before': there game 1 sha256:aa, here game 1 sha256:bb." in line
    assert "Computed again with it: examples, assignment, rollout" in line
    assert line.endswith("stagecoach replay before --regrade")
    assert told(root, "same", "game 1 sha256:aa, verifiers 0.4.0", seed=8) == []
    rehearse(root, "newer", steps=1, **with_version("game 1 sha256:bb, verifiers 0.4.0"))
    assert told(root, "brought-back", "game 1 sha256:aa, verifiers 0.4.0") == []
    assert told(root, "before", "game 1 sha256:cc, verifiers 0.4.0") == [], "a run that goes on is refused elsewhere"
    (line,) = told(root, "third", "game 1 sha256:cc, verifiers 0.4.0")
    assert "run 'newer'" in line
    (line,) = told(root, "scored", "game 1 sha256:cc, verifiers 0.4.0", kind="evaluate", evaluation={"num_examples": 1})
    assert "run 'newer'" in line and "--regrade" not in line


def test_a_replay_is_compared_with_the_run_that_it_goes_through(tmp_path: Path) -> None:
    root = tmp_path / "store"
    rehearse(root, "base", steps=1, **with_version("game 1 sha256:aa"))
    config = replays.ask(root, overrides=[replays.RLOO])
    environments = (config.environments[0].model_copy(update={"version": "game 1 sha256:bb"}),)
    context = RunContext(open_store(root), "again", config.model_copy(update={"environments": environments}), {})
    assert edits_since(context, {"filtering", "advantage"}) == [], "the environment's code has no part in these"
    (line,) = edits_since(context, {"regrade", "advantage"})
    assert "run 'base'" in line and line.endswith("Computed again with it: regrade")

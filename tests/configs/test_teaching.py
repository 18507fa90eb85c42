"""Configs with references and teachers: what is refused before anything starts, and what a run asks of whom."""

from typing import Any

import pytest

from configs.checks.run import problems
from configs.run import RunConfig, View, needs_reference_scores, only_teachers_sample, policy_scores
from tasks.advantage import reference
from tasks.rollout import stage as rollout

OPD: dict[str, Any] = {"type": "opd", "teacher": {"path": "/teacher"}}
SFT: dict[str, Any] = {"type": "sft", "teacher": {"path": "/teacher"}}
OPSD: dict[str, Any] = {"type": "opsd"}


def config(algorithm: dict[str, Any] | None = None, *own: dict[str, Any] | None, **sections: Any) -> RunConfig:
    """Return a run with an environment for each of its own algorithms, or one without."""
    environments = [
        {"name": f"e{index}", "taskset": {"id": "t"}, "algorithm": each} for index, each in enumerate(own or (None,))
    ]
    given = {"environments": environments, "algorithm": algorithm or {"type": "grpo"}} | sections
    return RunConfig.model_validate(given)


def test_what_can_work_is_let_through() -> None:
    assert problems(config(OPD)) == problems(config(None, SFT, OPSD, None)) == []


@pytest.mark.parametrize("kind", ["opd", "sft"])
@pytest.mark.parametrize(
    ("teacher", "said"), [({}, "neither is set"), ({"path": "/a", "url": "http://b"}, "both are set")]
)
def test_a_teacher_is_a_path_or_a_url(kind: str, teacher: dict[str, str], said: str) -> None:
    (problem,) = problems(config({"type": kind, "teacher": teacher}))
    assert problem.startswith("algorithm.teacher: give the path") and said in problem
    (problem,) = problems(config(None, None, {"type": kind, "teacher": teacher}))
    assert problem.startswith("environments.1.algorithm.teacher: ")


@pytest.mark.parametrize("algorithm", [OPD, OPSD], ids=["opd", "opsd"])
def test_what_is_compared_with_a_reference_is_sampled_at_temperature_1_and_whole(algorithm: dict[str, Any]) -> None:
    (problem,) = problems(config(algorithm, rollout={"temperature": 0.7}))
    assert problem.startswith("rollout.temperature: 0.7: ") and "temperature 1" in problem
    (problem,) = problems(config(algorithm, rollout={"top_p": 0.9}))
    assert problem.startswith("rollout.top_p: 0.9: ")
    own = {"name": "own", "taskset": {"id": "t"}, "temperature": 0.5}
    (problem,) = problems(config(algorithm, environments=(own,)))
    assert problem.startswith("environments.0.temperature: 0.5: ")


def test_a_trained_seat_beside_a_reference_is_sampled_at_temperature_1_too() -> None:
    frozen = {"temperature": 0.2, "model": {"path": "/judge"}}
    seats = {"a": {"temperature": 0.5}, "b": frozen, "c": {"temperature": 0.5, "trainable": False}}
    own = {"name": "own", "taskset": {"id": "t"}, "seats": seats}
    (problem,) = problems(config(OPD, environments=(own,)))
    assert problem.startswith("environments.0.seats.a.temperature: 0.5: ")


def test_temperatures_of_environments_without_a_reference_are_free() -> None:
    warm = {"name": "warm", "taskset": {"id": "t"}, "temperature": 0.5}
    drawn = {"name": "drawn", "taskset": {"id": "t"}, "temperature": 1.0, "algorithm": OPD}
    assert problems(config(environments=(warm, drawn), rollout={"temperature": 0.9})) == []
    assert problems(config(SFT, rollout={"temperature": 0.7})) == []


def test_a_template_shows_the_demonstration() -> None:
    (problem,) = problems(config(OPSD | {"template": "Do well."}))
    assert problem.startswith("algorithm.template: it shows no demonstration")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(OPD), (True, False, False)),
        (config(OPSD), (True, False, True)),
        (config(SFT), (False, True, False)),
        (config(None, SFT, None), (False, False, False)),
        (config(None, SFT, OPSD), (True, False, True)),
        (config(), (False, False, False)),
        (config(OPD, kind="evaluate"), (False, False, False)),
    ],
)
def test_who_is_asked(given: RunConfig, expected: tuple[bool, ...]) -> None:
    found = needs_reference_scores(given), only_teachers_sample(given), policy_scores(given)
    assert found == expected


def test_only_the_version_of_a_teacher_is_in_keys() -> None:
    def keys(teacher: dict[str, Any]) -> list[dict[str, Any]]:
        made = config(OPD | {"teacher": teacher}, SFT | {"teacher": teacher}, None)
        return [View(made, each.STAGE.sections, each.STAGE.name).content() for each in (reference, rollout)]

    here = {"path": "/a", "version": "v1"}
    assert keys(here) == keys({"url": "http://b", "version": "v1", "max_in_flight": 2, "memory_gib": 9})
    assert all(a != b for a, b in zip(keys(here), keys(here | {"version": "v2"}), strict=True))
    assert "teachers" not in View(config(OPD), rollout.STAGE.sections, "rollout").content()

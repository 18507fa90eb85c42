"""Sets of an evaluation: what each comes to, when it is due, what is in keys, and what is refused before a start."""

from typing import Any

import pytest

from configs.checks.environments import evaluation_problems
from configs.evaluation import EvaluationConfig
from configs.run import RunConfig, View, content

SETS = (
    {"name": "hard", "where": {"tier": [3, 4]}, "num_examples": 8, "attempts": 4, "pass_at": [1, 4], "every": 10},
    {"name": "all", "temperature": 0.0, "at_start": False},
)


def evaluation(**changes: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate({"num_examples": 32, "every": 2, "sets": SETS} | changes)


def test_a_set_takes_from_the_evaluation_what_it_leaves_open() -> None:
    hard, everyone = evaluation().of_sets().values()
    assert (hard.num_examples, hard.attempts, hard.pass_at, hard.temperature) == (8, 4, (1, 4), 1.0)
    assert hard.where == {"tier": (3, 4)} and everyone.where == {} and everyone.temperature == 0.0
    assert (everyone.num_examples, everyone.every, everyone.sets) == (32, 2, ())


def test_without_sets_the_evaluation_is_the_one_set() -> None:
    alone = evaluation(sets=())
    assert alone.of_sets() == {"": alone}


def test_each_set_is_due_by_its_own_interval() -> None:
    hard, everyone = evaluation().of_sets().values()
    assert [version for version in range(21) if hard.due(version)] == [0, 10, 20]
    assert [version for version in range(5) if everyone.due(version)] == [2, 4]
    assert not any(evaluation(every=0, sets=()).due(version) for version in range(5))
    assert evaluation().evaluates_training and not evaluation(every=0, sets=()).evaluates_training


def test_the_name_and_the_interval_of_a_set_are_in_no_key() -> None:
    other = [SETS[0] | {"name": "renamed", "every": 3, "pass_at": [2]}, SETS[1]]
    one, two = (each.of_sets() for each in (evaluation(), evaluation(sets=other)))
    assert content(one["hard"]) == content(two["renamed"]) != content(one["all"])


def problems(**settings: Any) -> list[str]:
    environment = {"name": "e", "taskset": {"id": "e"}} | settings.pop("environment", {})
    kind = settings.pop("kind", "evaluate")
    config = RunConfig.model_validate({"kind": kind, "environments": (environment,), "evaluation": settings})
    return list(evaluation_problems(config))


OF_OTHERS = {"url": "https://api.example.com/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sets": [{"name": "a"}, {"name": "a"}]}, "evaluation.sets: 2 of them are named 'a'"),
        ({"sets": [{"name": "a", "pass_at": [3]}]}, "evaluation.sets.0.pass_at: pass@3 needs"),
        ({"sets": [{"name": "a", "environments": ["x"]}]}, "evaluation.sets.0.environments: the run has no environ"),
        ({"where": {"tier": []}}, "evaluation.where.tier: no value is wanted"),
        ({"environment": {"holdout_fraction": 0}}, "evaluation: environment 'e' holds out nothing"),
        ({"external": OF_OTHERS, "kind": "train"}, "evaluation.external: a run of kind train has policies of its own"),
        ({"external": OF_OTHERS, "policy": "a:1"}, "evaluation.policy: evaluation.external is tried in place"),
        ({"external": OF_OTHERS | {"url": "host"}}, "evaluation.external: give the url of a chat API"),
        (
            {"external": OF_OTHERS, "environment": {"seats": {"judge": {"model": {"path": "/m"}}}}},
            "environments.0.seats: frozen models of seats play beside policies of ours",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(settings: dict[str, Any], problem: str) -> None:
    (line,) = problems(**settings)
    assert line.startswith(problem)


def test_what_works_is_not_refused() -> None:
    assert problems(sets=SETS) == [] == problems(external=OF_OTHERS) == problems()
    assert problems(kind="train", environment={"holdout_fraction": 0}) == [], "a run that evaluates nothing"


def test_someone_elses_model_is_in_the_keys_of_rollouts_and_only_of_evaluations() -> None:
    of = {"external": OF_OTHERS | {"api_key_variable": "ANY"}}
    run = RunConfig.model_validate({"kind": "evaluate", "evaluation": of})
    assert View(run, ("external",), "rollout").content() == {"external": OF_OTHERS | {"settings": {}}}
    assert View(RunConfig(), ("external",), "rollout").content() == {}
    assert content(run.evaluation) == content(EvaluationConfig()), "which examples are tried does not depend on it"

"""Sets of an evaluation: what each comes to, when it is due, what is in keys, and what is refused before a start."""

from configs.evaluation import EvaluationConfig
from configs.run import RunConfig, View, content

SETS = (
    {"name": "hard", "where": {"tier": [3, 4]}, "num_examples": 8, "attempts": 4, "pass_at": [1, 4], "every": 10},
    {"name": "all", "temperature": 0.0, "at_start": False},
)


def evaluation(**changes):
    return EvaluationConfig.model_validate({"num_examples": 32, "every": 2, "sets": SETS} | changes)


def test_a_set_takes_from_the_evaluation_what_it_leaves_open():
    hard, everyone = evaluation().of_sets().values()
    assert (hard.num_examples, hard.attempts, hard.pass_at, hard.temperature) == (8, 4, (1, 4), 1.0)
    assert hard.where == {"tier": (3, 4)} and everyone.where == {} and everyone.temperature == 0.0
    assert (everyone.num_examples, everyone.every, everyone.sets) == (32, 2, ())


def test_each_set_is_due_by_its_own_interval():
    hard, everyone = evaluation().of_sets().values()
    assert [version for version in range(21) if hard.due(version)] == [0, 10, 20]
    assert [version for version in range(5) if everyone.due(version)] == [2, 4]
    assert not any(evaluation(every=0, sets=()).due(version) for version in range(5))
    assert evaluation().evaluates_training and not evaluation(every=0, sets=()).evaluates_training


OWN = {"name": "own", "taskset": {"id": "t"}, "attempts": 2, "every": 3, "temperature": 0.5, "top_k": 4}


def test_an_environment_for_evaluation_is_a_set_of_its_name_and_leaves_the_others_as_they_are():
    named = {"environments": ("a", OWN, {"name": "a", "every": 5}), "sets": ()}
    every, own, again = evaluation(**named).of_sets().values()
    assert content(every) == content(evaluation(environments=("a",), sets=()))
    assert (own.environments, own.attempts, own.own_sampling, own.every) == (
        ("own",),
        2,
        {"temperature": 0.5, "top_k": 4},
        3,
    )
    assert (again.environments, again.attempts, again.every, again.num_examples) == (("a",), 1, 5, 32)
    assert [*evaluation(environments=(OWN,)).of_sets()] == ["hard", "all", "own"]
    assert [*evaluation(environments=(OWN,), sets=()).of_sets()] == ["own"], "what is trained on is not tried"


def test_environments_are_served_where_rollouts_are_made_in_them():
    def served(kind, *environments):
        trained = [{"name": "a", "taskset": {"id": "t"}}]
        run = {"kind": kind, "environments": trained, "evaluation": {"environments": environments}}
        return {where: entry.name for where, entry in RunConfig.model_validate(run).served_environments.items()}

    trained, own = {"environments.0": "a"}, {"evaluation.environments.0": "own"}
    assert served("train", OWN) == trained | own and served("train", {"name": "a"}) == trained
    assert served("sft", OWN) == own == served("evaluate", OWN)
    assert served("evaluate", OWN, "a") == trained | own and served("replay", OWN) == trained


OF_OTHERS = {"url": "https://api.example.com/v1", "model": "m"}


def test_someone_elses_model_is_in_the_keys_of_rollouts_and_only_of_evaluations():
    of = {"external": OF_OTHERS | {"api_key_variable": "ANY"}}
    run = RunConfig.model_validate({"kind": "evaluate", "evaluation": of})
    assert View(run, ("external",), "rollout").content() == {"external": OF_OTHERS | {"settings": {}}}
    assert View(RunConfig(), ("external",), "rollout").content() == {}
    assert content(run.evaluation) == content(EvaluationConfig()), "which examples are tried does not depend on it"

"""What a loaded environment says against a config: seats, rewards, examples and lengths, each in its place."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from configs.run import RunConfig
from flows.runtime.environment_checks import FIRST, Findings, environment_findings
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tests.fixtures.builders import example, table

ONE, TWO = {"agent": True}, {"left": True, "right": True}
GAME = {"name": "game", "taskset": {"id": "game"}}


def loaded(
    seats: dict[str, bool] = ONE, scores: bool = True, held_out: int = 4, name: str = "game", **task: Any
) -> LoadedEnvironment:
    """Return an environment of ten examples to train on, with `task` in all of them."""
    rows = [
        example(f"{split}-{n}", name, split)
        for split, count in (("train", 10), ("eval", held_out))
        for n in range(count)
    ]
    examples = table("examples", [row | {"task": json.dumps(task)} for row in rows])
    return LoadedEnvironment(examples, EnvironmentFacts(seats, scores))


def found(environment: LoadedEnvironment | None = None, kind: str = "train", **sections: Any) -> Findings:
    """Return what speaks against a run in one environment; a text has as many tokens as characters."""
    section = GAME | sections.pop("own", {})
    config = RunConfig.model_validate({"seed": 1, "kind": kind, "environments": [section]} | sections)
    return environment_findings(config, {"game": environment or loaded()}, lambda texts: [len(text) for text in texts])


def problems(environment: LoadedEnvironment | None = None, **sections: Any) -> list[str]:
    return found(environment, **sections).problems


RAE, GRPO, RIGHT = {"type": "rae"}, {"type": "grpo"}, {"seats": {"right": {"trainable": False}}}
EVALUATE = {"kind": "evaluate", "evaluation": {"num_examples": 4}}
SETS = [{"name": "few", "num_examples": 1}, {"name": "many", "num_examples": 9}]
LATE = {"where": {"colour": ["red"]}, "num_examples": 1}


@pytest.mark.parametrize(
    ("seats", "sections", "says"),
    [
        (TWO, {"algorithm": RAE}, []),
        (TWO, {"own": RIGHT}, []),
        (TWO, {"own": {"seats": {"right": {"model": {"path": "frozen"}}}}}, []),
        (TWO, {"own": {"learner_seat": True}}, []),
        (TWO, {"own": {"algorithm": RAE}}, []),
        ({"agent": True, "user": False, "judge": True}, {}, []),  # `drop_judge` leaves the judge out
        (TWO, EVALUATE, []),  # nothing is credited
        (TWO, {"algorithm": GRPO}, ["algorithm.type: environment 'game' trains 2 seats (left, right)"]),
        (TWO, {"algorithm": {"type": "rloo"}}, ["algorithm.type: environment 'game' trains 2 seats"]),
        (TWO, {"own": {"algorithm": GRPO}}, ["environments.0.algorithm.type: "]),
        (ONE, {"algorithm": RAE}, ["algorithm.type: 'rae' has a baseline for each of several trained seats"]),
        (
            ONE,
            {"algorithm": {"type": "hierarchical_grpo"}},
            ["algorithm.type: 'hierarchical_grpo' has a baseline for each"],
        ),
        ({"user": False}, {"algorithm": GRPO}, ["environments.0.seats: no seat of 'game' is trained"]),
        (
            {"agent": True, "judge": True},
            {"own": {"drop_judge": False}},
            ["algorithm.type: environment 'game' trains 2 seats (agent, judge)"],
        ),
        (
            ONE,
            {"kind": "evaluate", "evaluation": {"sets": SETS}},
            ["evaluation.sets.1: environment 'game' has 4 examples"],
        ),
        (ONE, {"kind": "evaluate", "evaluation": LATE}, ["evaluation: "]),
    ],
)
def test_an_algorithm_that_does_not_fit_the_seats(seats, sections, says):
    lines = problems(loaded(seats, prompt="short"), **sections)
    assert len(lines) == len(says) and all(line.startswith(start) for line, start in zip(lines, says, strict=True))


def test_nothing_speaks_against_what_fits():
    assert found(loaded(prompt="short")) == Findings([], [])


def test_environments_of_one_and_of_several_seats_are_not_trained_in_one_run():
    environments = [GAME | {"algorithm": RAE}, GAME | {"name": "sums"}]
    config = RunConfig.model_validate({"seed": 1, "kind": "train", "environments": environments})
    games = {"game": loaded(TWO), "sums": loaded(name="sums")}
    (line,) = environment_findings(config, games, lambda texts: None).problems
    assert line.startswith("environments: 'game' trains several seats and 'sums' one")


def test_rewards_that_nothing_gives_stop_what_learns_from_them():
    (line,) = problems(loaded(scores=False))
    assert line.startswith("environments.0: ") and "no reward function" in line and "@vf.reward" in line
    for sections in (EVALUATE, {"algorithm": {"type": "opd"}}):
        findings = found(loaded(scores=False), **sections)
        assert findings.problems == [] and "every reward is 0" in findings.notes[0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_set_that_is_due_needs_its_examples(every):
    lines = problems(loaded(held_out=2), evaluation={"num_examples": 3, "every": every})
    assert bool(lines) == bool(every)
    assert all(line.startswith("evaluation: ") and "2 examples" in line and "3 are wanted" in line for line in lines)


def test_something_must_be_left_to_train_on():
    rows = table("examples", [example("e", "game", "eval")])
    (line,) = problems(LoadedEnvironment(rows, EnvironmentFacts(ONE, True)))
    assert line.startswith("environments.0.holdout_fraction: all 1 examples")


@pytest.mark.parametrize(
    "task",
    [
        {"prompt": "x" * 600},
        {"prompt": "", "system_prompt": "x" * 600},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x" * 600}]}]},
    ],
)
def test_prompts_that_are_all_longer_than_the_context_name_both_lengths(task):
    (line,) = problems(loaded(**task))
    assert line.startswith("environments.0: 14 of the first 14 prompts")
    assert "600 tokens" in line and "engine.max_model_len is 512" in line


def test_a_prompt_of_many_that_is_longer_is_said_and_the_run_goes_on():
    rows = [
        example(f"e{number}", "game") | {"task": json.dumps({"prompt": "x" * (511 + number % 2)})}
        for number in range(99)
    ]
    findings = found(LoadedEnvironment(table("examples", rows), EnvironmentFacts(ONE, True)))
    assert findings.problems == []
    assert f"{FIRST // 2} of the first {FIRST} prompts" in findings.notes[0] and "512 tokens" in findings.notes[0]


def test_without_a_tokenizer_nothing_is_said_of_lengths():
    def unknown(texts: Sequence[str]) -> None:
        return None

    config = RunConfig.model_validate({"seed": 1, "kind": "train", "environments": [GAME]})
    assert environment_findings(config, {"game": loaded(prompt="x" * 9999)}, unknown) == Findings([], [])


def test_the_key_of_a_judge_reaches_the_environment_or_is_said_to_be_missing(monkeypatch):
    own = loaded()
    asks = replace(own, facts=replace(own.facts, keys={"PRIME_API_KEY": "https://judge/v1"}))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    (note,) = found(asks).notes
    assert note.startswith("environments.0: 'game' asks a model at https://judge/v1") and "not set" in note
    monkeypatch.setenv("PRIME_API_KEY", "sesame")
    (line,) = problems(asks)
    assert line.startswith("environments.0.variables: ") and line.endswith('variables = ["PRIME_API_KEY"]')
    assert "sesame" not in line
    assert found(asks, own={"variables": ["PRIME_API_KEY"]}) == Findings([], [])


def test_examples_that_are_left_out_are_counted_in_a_note():
    environment = loaded()
    facts = replace(environment.facts, num_beyond="100,000", num_repeated=2)
    assert found(replace(environment, facts=facts), own={"max_examples": 14}).notes == [
        "environments.0.max_examples: the first 14 examples are read, 100,000 more are left out; raise max_examples to "
        "read them",
        "environments.0: 2 examples repeat earlier ones and are left out",
    ]


def test_a_long_prompt_is_counted_as_far_as_its_beginning():
    """Prompts of megabytes are not counted whole."""
    config = RunConfig.model_validate({"seed": 1, "environments": [GAME], "engine": {"max_model_len": 100}})
    prompts, counted = ["a" * 1_000_000, "a" * 30, " " * 1600 + "a" * 200], list[int]()

    def count(texts: Sequence[str]) -> list[int]:
        counted.extend(map(len, texts))
        return [len(text.strip()) for text in texts]

    rows = [example(f"train-{n}", "game") | {"task": json.dumps({"prompt": each})} for n, each in enumerate(prompts)]
    environment = LoadedEnvironment(table("examples", rows), EnvironmentFacts(ONE, scores=True))
    (note,) = environment_findings(config, {"game": environment}, count).notes
    assert "2 of the first 3 prompts do not fit the context: the longest has at least 1600 tokens" in note
    assert counted == [1600, 30, 1600, 1800], "a beginning of few tokens says nothing of the rest"


def test_prompts_that_are_not_counted_are_said():
    (note,) = found(own={"max_prompt_tokens": 9}).notes
    assert note == (
        "environments.0.max_prompt_tokens: no prompt was counted, because the model and its tokenizer are not here"
    )
    assert found(own={"max_prompt_tokens": 9}, model={"path": "here"}).notes == []

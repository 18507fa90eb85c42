"""What a loaded environment says against a config: seats, rewards, examples and lengths, each in its place."""

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.runtime import machine_facts
from flows.runtime.preflight import FIRST, environment_findings
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tests.fixtures.builders import example, table

ONE, TWO = {"agent": True}, {"left": True, "right": True}
GAME = {"name": "game", "taskset": {"id": "game"}}


def loaded(seats=ONE, scores=True, held_out=4, name="game", **task):
    """Return an environment of ten examples to train on, with `task` in all of them."""
    rows = [
        example(f"{split}-{n}", name, split)
        for split, count in (("train", 10), ("eval", held_out))
        for n in range(count)
    ]
    examples = table("examples", [row | {"task": json.dumps(task)} for row in rows])
    return LoadedEnvironment(examples, EnvironmentFacts(seats, scores))


def lengths(texts):
    return [len(text) for text in texts]


def split(findings):
    """Return the texts of problems and of notes."""
    return [text for stops, text in findings if stops], [text for stops, text in findings if not stops]


def found(environment=None, kind="train", count=lengths, **sections):
    """Return what speaks against a run in one environment; a text has as many tokens as `count` says."""
    section = GAME | sections.pop("own", {})
    config = RunConfig.model_validate({"seed": 1, "kind": kind, "environments": [section]} | sections)
    return split(environment_findings(config, {"game": environment or loaded()}, count))


def with_rows(rows):
    """Return an environment of one seat with these examples."""
    return LoadedEnvironment(table("examples", rows), EnvironmentFacts(ONE, True))


def with_prompts(prompts):
    rows = [example(f"train-{n}", "game") | {"task": json.dumps({"prompt": each})} for n, each in enumerate(prompts)]
    return with_rows(rows)


def play_seat(episode, seat="right", name="rival"):
    return {seat: name}


def problems(environment=None, **sections):
    return found(environment, **sections)[0]


RAE = {"type": "rae"}
EVALUATE = {"kind": "evaluate", "evaluation": {"num_examples": 4}}
CASES = tomllib.loads((Path(__file__).parent / "seats.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES["faults"], ids=lambda case: case["says"])
def test_an_algorithm_that_does_not_fit_the_seats(case):
    (line,) = problems(loaded(case["seats"], prompt="short"), **case["sections"])
    assert line.startswith(case["says"])


@pytest.mark.parametrize("case", CASES["fine"], ids=str)
def test_what_fits_the_seats(case):
    assert problems(loaded(case["seats"], prompt="short"), **case["sections"]) == []


def test_nothing_speaks_against_what_fits():
    assert found(loaded(prompt="short")) == ([], [])


def test_images_are_for_one_seat():
    prompt = [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    (line,) = problems(loaded(TWO, prompt=prompt), algorithm=RAE)
    assert line.startswith("environments.0: prompts show images, and it has the seats left, right: several agents")
    assert problems(loaded(prompt=prompt)) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seat": "rigth"}, "UnknownPlayer: there is no seat 'rigth' here, but left, right; did you mean right?"),
        ({"name": "rivl"}, "UnknownPlayer: there is no model 'rivl' here, but policy, rival; did you mean rival?"),
        ({}, ""),
    ],
)
def test_a_binding_that_names_nobody_is_refused_before_the_start(arguments, says):
    bindings = {"function": f"{__name__}:play_seat", "arguments": arguments, "models": {"rival": {"path": "weights"}}}
    lines = problems(loaded(TWO, prompt="short"), algorithm=RAE, own={"bindings": bindings})
    assert lines == [f"environments.0.bindings: {says}"] * bool(says)


def test_environments_of_one_and_of_several_seats_are_not_trained_in_one_run():
    environments = [GAME | {"algorithm": RAE}, GAME | {"name": "sums"}]
    config = RunConfig.model_validate({"seed": 1, "kind": "train", "environments": environments})
    games = {"game": loaded(TWO), "sums": loaded(name="sums")}
    ((stops, line),) = environment_findings(config, games, lambda texts: None)
    assert stops and line.startswith("environments: 'game' trains several seats and 'sums' one")


def test_rewards_that_nothing_gives_stop_what_learns_from_them():
    (line,) = problems(loaded(scores=False))
    assert line.startswith("environments.0: ") and "no reward function" in line and "@vf.reward" in line
    for sections in (EVALUATE, {"algorithm": {"type": "opd"}}):
        findings = found(loaded(scores=False), **sections)
        assert findings[0] == [] and "every reward is 0" in findings[1][0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_set_that_is_due_needs_its_examples(every):
    lines = problems(loaded(held_out=2), evaluation={"num_examples": 3, "every": every})
    assert bool(lines) == bool(every)
    assert all(line.startswith("evaluation: ") and "2 examples" in line and "3 are wanted" in line for line in lines)


def test_something_must_be_left_to_train_on():
    (line,) = problems(with_rows([example("e", "game", "eval")]))
    assert line.startswith("environments.0.holdout_fraction: all 1 examples")


@pytest.mark.parametrize(
    "task",
    [
        {"prompt": "x" * 600},
        {"prompt": "", "system_prompt": "x" * 600},
        {"prompt": [{"content": ["abc", {"type": "text", "text": None}]}, {"content": "x" * 600}]},
    ],
)
def test_prompts_that_are_all_longer_than_the_context_name_both_lengths(task):
    (line,) = problems(loaded(**task))
    assert line.startswith("environments.0: 14 of the first 14 prompts")
    assert "600 tokens" in line and "engine.max_model_len is 512" in line


def test_a_prompt_of_many_that_is_longer_is_said_and_the_run_goes_on():
    findings = found(with_prompts("x" * (511 + number % 2) for number in range(99)))
    assert findings[0] == []
    assert f"{FIRST // 2} of the first {FIRST} prompts" in findings[1][0] and "512 tokens" in findings[1][0]


def test_without_a_tokenizer_nothing_is_said_of_lengths():
    assert found(loaded(prompt="x" * 9999), count=lambda texts: None) == ([], [])


def test_the_key_of_a_judge_reaches_the_environment_or_is_said_to_be_missing(monkeypatch):
    asks = replace(loaded(), facts=EnvironmentFacts(ONE, True, keys={"PRIME_API_KEY": "https://judge/v1"}))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    (note,) = found(asks)[1]
    assert note.startswith("environments.0: 'game' asks a model at https://judge/v1") and "not set" in note
    monkeypatch.setenv("PRIME_API_KEY", "sesame")
    (line,) = problems(asks)
    assert line.startswith("environments.0.variables: ") and line.endswith('variables = ["PRIME_API_KEY"]')
    assert "sesame" not in line
    assert found(asks, own={"variables": ["PRIME_API_KEY"]}) == ([], [])


def test_examples_that_are_left_out_are_counted_in_a_note():
    facts = EnvironmentFacts(ONE, True, num_beyond="100,000", num_repeated=2)
    assert found(replace(loaded(), facts=facts), own={"max_examples": 14})[1] == [
        "environments.0.max_examples: the first 14 examples are read, 100,000 more are left out; raise max_examples to "
        "read them",
        "environments.0: 2 examples repeat earlier ones and are left out",
    ]


def test_a_long_prompt_is_counted_as_far_as_its_beginning():
    """Prompts of megabytes are not counted whole."""
    counted = []

    def count(texts):
        counted.extend(map(len, texts))
        return counted

    (note,) = found(with_prompts(["a" * 1_000_000, "a" * 30]), count=count, engine={"max_model_len": 100})[1]
    assert "1 of the first 2 prompts do not fit the context: the longest has at least 1600 tokens" in note
    assert counted == [1600, 30]


@pytest.mark.parametrize(
    ("script", "seconds", "says"),
    [("echo 'no daemon' >&2; exit 1", 60, r"makes no containers here \(no daemon\)"), ("exec sleep 600", 1, "in 1 s")],
)
def test_a_container_engine_that_does_not_answer_is_refused(script, seconds, says, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine_facts, "ANSWER_SECONDS", seconds)
    config = RunConfig.model_validate({"kind": "train", "environments": [GAME | {"runtime": {"type": "docker"}}]})
    with pytest.raises(ConfigError, match=rf"environments.0.runtime: 'docker' .*{says}"):
        machine_facts.config_versions(config)

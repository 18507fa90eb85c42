"""Configs of prime-rl in our words: of today, of earlier versions, and of single components."""

import tomllib
from typing import Any

import pytest

from configs.load import load
from configs.run import RunConfig
from configs.trainers.prime_rl import TRAINER
from configs.trainers.translation import Translation, config_of, flat, translate

TODAY = """
max_steps = 30
seq_len = 4096
[model]
name = "some/model"
[monitors.wandb]
project = "words"
[ckpt]
[orchestrator]
batch_size = 64
group_size = 8
max_off_policy_steps = 4
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
[orchestrator.train.sampling]
max_completion_tokens = 256
[[orchestrator.train.source]]
name = "words"
ratio = 2.0
[orchestrator.train.source.env.taskset]
id = "word-game"
min_turns = 3
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
[orchestrator.eval]
interval = 5
num_examples = 32
skip_first_step = true
[trainer.optim]
type = "sign_sgd"
lr = 3e-6
[trainer.model.ac]
freq = 2
[trainer.model.lora]
rank = 8
target_modules = ["q_proj", "v_proj"]
[inference.vllm]
tensor_parallel_size = 4
"""
EARLIER = """
max_steps = 10
max_async_level = 2
seq_len = 2048
[orchestrator]
batch_size = 32
rollouts_per_example = 4
oversampling_factor = 1.5
[orchestrator.sampling]
max_tokens = 100
temperature = 0.7
[orchestrator.buffer]
online_difficulty_filtering = true
[[orchestrator.env]]
id = "owner/word-game"
args = { rounds = 2 }
[[orchestrator.post_batch_filters]]
type = "gibberish"
enforce = true
[inference.parallel]
tp = 2
"""


def translated(text: str) -> tuple[RunConfig, Translation]:
    """Return the config that comes out of an `rl.toml`, and what is said of it."""
    found = translate(dict(flat(tomllib.loads(text))), TRAINER)
    return load(base=config_of(found.settings)), found


def lost(found: Translation, key: str) -> str:
    """Return why a key has no counterpart."""
    (why,) = [each.why for each in found.missing if each.keys.startswith(key)]
    return why


def test_a_config_of_today() -> None:
    config, found = translated(TODAY)
    assert (config.steps, config.model.path, config.model.renderer) == (30, "some/model", "qwen3")
    assert config.model.renderer_settings == {"enable_thinking": False}
    assert (config.assignment.groups_per_step, config.assignment.group_size) == (8, 8)
    assert (config.rollout.max_tokens, config.rollout.max_off_policy_steps) == (256, 4)
    assert (config.engine.max_model_len, config.packing.tokens_per_row) == (4096, 4096)
    assert config.engine.extra_arguments == ("--tensor-parallel-size", "4")
    (environment,) = config.environments
    assert (environment.name, environment.weight) == ("words", 2.0)
    assert environment.taskset == {"id": "word-game", "min_turns": 3} and environment.harness == {"id": "chat_loop"}
    training = config.training
    assert training.optimizer.type == "sign_sgd" and training.optimizer.momentum == 0.0
    assert (training.learning_rate, training.weight_decay) == (3e-6, 0.01)
    assert training.gradient_checkpointing and training.checkpoint_every == 2
    assert training.lora is not None and training.lora.target_modules == ("q_proj", "v_proj")
    assert (config.evaluation.every, config.evaluation.num_examples, config.evaluation.at_start) == (5, 32, False)
    assert config.tracking.type == "wandb" and config.tracking.project == "words"
    assert found.unknown == [] and found.missing == []


def test_a_config_of_an_earlier_version() -> None:
    config, found = translated(EARLIER)
    assert (config.assignment.groups_per_step, config.assignment.group_size) == (8, 4)
    assert (config.rollout.max_tokens, config.rollout.temperature, config.rollout.max_off_policy_steps) == (100, 0.7, 2)
    assert config.assignment.refill and config.engine.extra_arguments == ("--tensor-parallel-size", "2")
    assert config.environments[0].taskset == {"id": "owner/word-game", "rounds": 2}
    assert next(each for each in config.filtering.filters if each.type == "gibberish").enforce
    assert "max_in_flight" in lost(found, "orchestrator.oversampling_factor")
    assert "settings of the taskset" in lost(found, "orchestrator.env.0.args")
    assert found.unknown == []


def algorithm(text: str) -> tuple[Any, Translation]:
    """Return the run's algorithm out of the tables below `orchestrator.algo`."""
    config, found = translated(f"[orchestrator]\nbatch_size = 8\ngroup_size = 2\n{text}")
    return config.algorithm, found


def test_algorithms() -> None:
    own, _ = algorithm('[orchestrator.algo]\ntype = "rae"')
    assert (own.type, own.decay, own.key, own.order) == ("rae", 0.95, "agent", "pre")
    own, _ = algorithm(
        '[orchestrator.algo]\ntype = "grpo"\nlength_penalty = { type = "linear", num_turns_weight = 0.3 }'
    )
    assert (own.length_penalty.turns, own.length_penalty.output) == (0.3, 0.25)
    own, _ = algorithm('[orchestrator.algo]\ntype = "opsd"\ndemo_key = "solution"')
    assert own.demonstration == "solution"
    own, found = algorithm('[orchestrator.algo]\ntype = "opd"\nteacher = { name = "t", base_url = "http://h:8001/v1" }')
    assert own.teacher.url == "http://h:8001" and "asked for" in lost(found, "orchestrator.algo.teacher.name")
    own, found = algorithm('[orchestrator.algo]\ntype = "echo"\nroles = { user = { alpha = 0.2 } }')
    assert own.user.alpha == 0.2 and "tool=null" in lost(found, "orchestrator.algo.roles")


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ('type = "linear"\nwarmup_steps = 3\ndecay_steps = 20\nmin_lr = 1e-7', ("wsd", 100, 3, 0.1)),
        ('type = "cosine"\nwarmup_steps = 5', ("cosine", 100, 5, 0.0)),
        ('type = "linear"', ("wsd", 100, 10, 0.0)),
    ],
)
def test_a_decay_is_of_the_last_steps(scheduler: str, expected: tuple[str, int, int, float]) -> None:
    config, _ = translated(f"max_steps = 100\n[trainer.optim]\nlr = 1e-6\n[trainer.scheduler]\n{scheduler}")
    training = config.training
    assert (training.schedule.type, training.decay_steps, training.warmup_steps) == expected[:3]
    assert training.schedule.min_ratio == pytest.approx(expected[3])  # type: ignore[union-attr]


def test_a_constant_rate_has_neither_warm_up_nor_decay() -> None:
    config, _ = translated('[trainer.scheduler]\ntype = "constant"')
    assert (config.training.schedule.type, config.training.decay_steps, config.training.warmup_steps) == (
        "constant",
        0,
        0,
    )


def test_losses() -> None:
    config, found = translated('[trainer.loss]\ntype = "default"\ndppo_mask_high = 0.3\nkl_tau = 0.0\nadv_tau = 2.0')
    assert config.training.loss.model_dump(include={"type", "mask_high", "kl_tau"}) == {
        "type": "dppo",
        "mask_high": 0.3,
        "kl_tau": 0.0,
    }
    assert "no such setting" in lost(found, "trainer.loss.adv_tau")
    _, found = translated('[trainer.loss]\ntype = "custom"\nimport_path = "my.loss"')
    assert "function of your own" in lost(found, "trainer.loss.type")


def test_several_agents_are_seats_where_they_differ() -> None:
    text = """
[[orchestrator.train.source]]
[orchestrator.train.source.env]
rounds = 3
taskset = { id = "game" }
a = { harness = { id = "bash" }, max_turns = 4 }
b = { harness = { id = "null" }, timeout = { rollout = 60, scoring = 5 } }
"""
    config, found = translated(text)
    (environment,) = config.environments
    assert environment.env == {"rounds": 3} and set(environment.seats) == {"a", "b"}
    assert environment.seats["a"].harness == {"id": "bash"} and environment.seats["a"].max_turns == 4
    assert config.rollout.timeout_seconds == 60
    assert "one limit" in lost(found, "orchestrator.train.source.0.env.b.timeout.scoring")


def test_curricula() -> None:
    text = """
[[orchestrator.train.source]]
env = { taskset = { id = "game" } }
[orchestrator.train.source.curriculum.sampler]
type = "difficulty_pool"
pools = { hard = { threshold = 0.4, weight = 0.5 }, easy = { threshold = 1.0, weight = 0.1 } }
[orchestrator.train.source.curriculum.gates.zero]
type = "advantage_range"
"""
    config, _ = translated(text)
    assert config.assignment.sampler.type == "difficulty_pools"
    assert [pool.name for pool in config.assignment.sampler.pools] == ["hard", "easy"]
    assert config.admission is not None and config.admission.reject_max == 0


def test_what_is_not_valid_here_is_listed() -> None:
    config, found = translated('[trainer.optim]\ntype = "sgd"\n[orchestrator.eval]\nnum_examples = -1\ninterval = 10')
    assert config.training.optimizer.type == "adamw" and config.evaluation.num_examples == 64
    assert {each.keys.partition(" =")[0] for each in found.missing} >= {
        "trainer.optim.type",
        "orchestrator.eval.num_examples",
    }

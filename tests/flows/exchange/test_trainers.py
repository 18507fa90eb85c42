"""Configs of TRL and prime-rl as settings: published files, single keys, and every key taken over or listed."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import known_keys, load
from configs.run import RunConfig
from flows.exchange.foreign_keys import flatten, matches
from flows.exchange.trainers import PRIME_RL, TRL, ForeignTrainer, Translation, read_foreign, translate, tree_of

HERE = Path(__file__).parent / "trainers"
PUBLISHED = Path(__file__).parents[2] / "fixtures/published"
# Arguments of GRPOConfig, its bases and TRL's script (f2cd577); keys of prime-rl's published configs, 0.5 to 559b447.
KEYS = {
    trainer.name: (HERE / file).read_text(encoding="utf-8").replace("*", "0").split()
    for trainer, file in ((TRL, "grpo_arguments.txt"), (PRIME_RL, "prime_rl_keys.txt"))
}
BY_NAME = {trainer.name: trainer for trainer in (TRL, PRIME_RL)}
CASES = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))
trainers = pytest.mark.parametrize("trainer", [TRL, PRIME_RL], ids=lambda trainer: trainer.name)


def moved(*files: str) -> tuple[RunConfig, Translation]:
    """Return the config that files become, and the translation."""
    trainer, tree = read_foreign(files)
    translation = translate(tree, trainer)
    return load(base=tree_of(translation.settings)), translation


def values(config: RunConfig, expected: dict[str, Any]) -> dict[str, Any]:
    """Return what a config has at the dotted keys of `expected`."""
    flat = dict(flatten(config.model_dump(mode="json")))
    return {key: round(value, 9) if isinstance(value := flat.get(key), float) else value for key in expected}


def as_tree(keys: dict[str, Any], trainer: ForeignTrainer) -> dict[str, Any]:
    """Return keys by dotted name as a file of the trainer has them, items of lists numbered."""
    return _with_lists(tree_of(keys)) if trainer is PRIME_RL else keys


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inner = {name: _with_lists(value) for name, value in node.items()}
    return list(inner.values()) if inner and all(name.isdecimal() for name in inner) else inner


def as_text(translation: Translation) -> str:
    return "\n".join(f"{keys}: {why}" for keys, why in translation.lost.items())


@pytest.mark.parametrize("case", CASES["published"], ids=lambda case: case["files"][0])
def test_published_configs(case: dict[str, Any]) -> None:
    config, translation = moved(*(str(PUBLISHED / name) for name in case["files"]))
    assert values(config, case["settings"]) == case["settings"]
    assert case["lost"] in as_text(translation) and "no key of" not in as_text(translation)


@pytest.mark.parametrize("case", CASES["taken"], ids=lambda case: str(case["keys"])[:60])
def test_what_keys_become(case: dict[str, Any]) -> None:
    trainer = BY_NAME[case["trainer"]]
    steps = {} if trainer is PRIME_RL else {"max_steps": 80}  # without a number of steps TRL's schedule is lost
    config = load(base=tree_of(translate(steps | case["keys"], trainer).settings))
    assert values(config, case["settings"]) == case["settings"]


@pytest.mark.parametrize("case", CASES["lost"], ids=lambda case: str(case["keys"])[:60])
def test_a_key_that_is_not_taken_over_has_a_reason(case: dict[str, Any]) -> None:
    translation = translate(case["keys"], BY_NAME[case["trainer"]])
    reasons = [why for names, why in translation.lost.items() if case["names"] in names]
    assert any(case["why"] in why for why in reasons), as_text(translation)
    load(base=tree_of(translation.settings))


def test_adapters_that_are_switched_off_are_none() -> None:
    assert "training.lora" not in translate({"use_peft": False, "lora_r": 8}, TRL).settings


def test_a_value_that_asks_for_nothing_is_off() -> None:
    off = {"beta": 0.0, "top_k": 0, "num_iterations": 1, "top_entropy_quantile": 1.0}
    translation = translate({"max_steps": 9, **off}, TRL)
    assert (translation.off, translation.lost) == (list(off), {})


@trainers
def test_every_published_key_is_in_the_table_once(trainer: ForeignTrainer) -> None:
    keys = KEYS[trainer.name]
    assert len(keys) > 200
    assert [key for key in keys if not any(matches(key, pattern) for pattern in trainer.patterns)] == []
    missing = [pattern for patterns, _, _ in trainer.missing for pattern in patterns]
    assert len(missing) == len({*missing})
    assert {*trainer.keys} <= {*known_keys(RunConfig)} and {*trainer.computed, *trainer.notes} <= {*trainer.keys}


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 5000), st.floats(0, 2), st.just([]), st.just({}), st.just({"a": 1})),
    st.sampled_from(["linear", "cosine", "dapo", "steps", "adamw", "auto", "x y", "", "inf", ["q_proj"]]),
)


@trainers
@settings(max_examples=20)
@given(data=st.data())
def test_whatever_is_given_what_comes_out_loads(trainer: ForeignTrainer, data: st.DataObject) -> None:
    keys = data.draw(st.dictionaries(st.sampled_from(KEYS[trainer.name]), VALUES, max_size=8))
    keys = {
        key: value for key, value in keys.items() if not any(key != other and matches(other, key) for other in keys)
    }
    translation = translate(as_tree(keys, trainer), trainer)
    assert load(base=tree_of(translation.settings)).environments


@trainers
def test_no_key_is_lost_in_silence(trainer: ForeignTrainer) -> None:
    for key in KEYS[trainer.name]:
        translation = translate(as_tree({key: 3}, trainer), trainer)
        places = [*translation.origins.values(), *translation.lost, *translation.off]
        computed = [new for new, old in trainer.keys.items() if any(matches(key, pattern) for pattern in old)]
        # A computed setting may have nothing to write for 3: another key decides.
        assert any(key in place for place in places) or {*computed} & {*trainer.computed}, key


def refusal(*files: Path) -> str:
    """Return the message that refuses files."""
    with pytest.raises(ConfigError) as caught:
        read_foreign([str(file) for file in files])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "keyword"),
    [
        ("a.sh", "echo 'a", "not SH"),
        ("a.sh", "trl vllm-serve --model a", "want one command"),
        ("a.toml", "a = [", "not TOML"),
        ("a.json", "[1]", "this is list"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.py", "GRPOConfig(seed=1)", "give the arguments"),
        ("a.toml", "steps = 3", "neither prime-rl's"),
        ("a.toml", '[optim]\nlr = 1\n[data]\nname = "x"', "supervised"),
        ("a.toml", 'max_steps = 5\n[inference]\n[data]\nname = "x"\n[eval]\ninterval = 2', "supervised"),
        ("a.toml", '[slurm]\njob_name = "x"\n[data]\ntype = "fake"', "supervised"),
        ("a.toml", 'model = "x"\n[[eval.source]]\nname = "y"', "for evaluations"),
        ("a.toml", "[inference.vllm]\nmax_model_len = 5", "trains none"),
        *(
            ("a.toml", (PUBLISHED / f"refused_{name}.toml").read_text(), keyword)
            for name, keyword in (("sft", "supervised"), ("evals", "for evaluations"), ("inference", "trains none"))
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, keyword: str) -> None:
    (tmp_path / name).write_text(text)
    message = refusal(tmp_path / name)
    assert keyword in message and name in message


def test_files_that_are_no_configs_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.toml")
    assert "is longer than 10,000,000 characters, so it is no config" in refusal(Path("/dev/zero"))
    (tmp_path / "a.toml").write_text("[trainer]\n[orchestrator]\nbatch_size = 8")
    (tmp_path / "b.yaml").write_text("beta: 1")
    assert "different trainers" in refusal(tmp_path / "a.toml", tmp_path / "b.yaml")


def test_a_command_has_the_arguments_after_its_script(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "# with two processes\naccelerate launch --num_processes 2 \\\n train.py --use-vllm --learning-rate=1e-6 \\\n"
        ' --lora_target_modules "q_proj", v_proj --beta 0.0 --bf16 false'
    )
    assert read_foreign([str(tmp_path / "a.sh")]) == (
        TRL,
        {
            "use_vllm": True,
            "learning_rate": 1e-6,
            "lora_target_modules": ["q_proj", "v_proj"],
            "beta": 0.0,
            "bf16": False,
            "use_peft": False,  # without --use_peft TRL's script takes no notice of adapters
        },
    )


@pytest.mark.parametrize(
    ("name", "text", "trainer", "tree"),
    [
        ("a.yaml", "learning_rate: 1e-6\nrun_name: 1e", TRL, {"learning_rate": 1e-6, "run_name": "1e"}),
        ("a.json", json.dumps({"optim": "adamw_torch", "beta": 0.1}), TRL, {"optim": "adamw_torch", "beta": 0.1}),
        (
            "a.toml",
            'batch_size = 8\n[[env]]\nid = "game"',
            PRIME_RL,
            {"orchestrator": {"batch_size": 8, "env": [{"id": "game"}]}},
        ),
        ("a.toml", "[optim]\nlr = 1e-5\n[scheduler]", PRIME_RL, {"trainer": {"optim": {"lr": 1e-5}, "scheduler": {}}}),
    ],
)
def test_whose_a_file_is(tmp_path: Path, name: str, text: str, trainer: ForeignTrainer, tree: dict[str, Any]) -> None:
    (tmp_path / name).write_text(text)
    assert read_foreign([str(tmp_path / name)]) == (trainer, tree)

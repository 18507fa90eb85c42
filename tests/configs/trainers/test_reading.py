"""Files of other trainers: which trainer's they are, and scripts that are read and not run."""

import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.trainers.reading import read_foreign

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
open({marker!r}, "w")
MODEL = "some/model"

def main(args):
    data = load_dataset("a/b", "main", split="train[:10%]")
    config = GRPOConfig(output_dir="out", learning_rate=1e-5, seed=args.seed, max_steps=7, **args.more)
    peft = LoraConfig(r=8, target_modules=["q_proj"], bias="none")
    GRPOTrainer(model=MODEL, reward_funcs=[half, full], args=config, peft_config=peft).train()
"""


def written(path: Path, text: str) -> str:
    """Write a file and return its name."""
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*files: str) -> str:
    """Return what is said of files that cannot be read."""
    with pytest.raises(ConfigError) as caught:
        read_foreign(files)
    return str(caught.value)


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    trainer, keys, unread = read_foreign([written(tmp_path / "train.py", SCRIPT.format(marker=str(marker)))])
    assert trainer.name == "TRL" and not marker.exists()
    assert keys == {
        "dataset_name": "a/b",
        "dataset_config": "main",
        "dataset_train_split": "train[:10%]",
        "output_dir": "out",
        "learning_rate": 1e-5,
        "max_steps": 7,
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
        "model_name_or_path": "some/model",
        "reward_funcs": "[half, full]",
    }
    assert [line.partition(":")[0] for line in unread] == ["seed", "**"]


def test_an_argument_of_the_script_s_own_command_line_counts_by_its_default(tmp_path: Path) -> None:
    text = """
parser.add_argument("--learning-rate", type=float, default=5e-6)
parser.add_argument("--max-steps", type=int, default=len(rows))
GRPOConfig(learning_rate=args.learning_rate, max_steps=args.max_steps)
"""
    _, keys, unread = read_foreign([written(tmp_path / "a.py", text)])
    assert keys == {"learning_rate": 5e-6} and [line.partition(":")[0] for line in unread] == ["max_steps"]


def test_a_command_has_the_arguments_after_its_script(tmp_path: Path) -> None:
    text = """
# with two processes
accelerate launch --num_processes 2 \\
    train.py --use-vllm --learning-rate=1e-6 \\
    --lora_target_modules "q_proj", v_proj --beta 0.0 --bf16 false
"""
    _, keys, _ = read_foreign([written(tmp_path / "a.sh", text)])
    assert keys == {
        "use_vllm": True,
        "learning_rate": 1e-6,
        "lora_target_modules": ["q_proj", "v_proj"],
        "beta": 0.0,
        "bf16": False,
        "use_peft": False,
    }


def test_a_notebook_is_read_as_a_script(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["GRPOConfig(seed=1)"]},
        {"cell_type": "code", "source": ["!pip install trl\n", "if True:\n", "    %time\n", "    rate = 1e-5"]},
        {"cell_type": "code", "source": "GRPOConfig(learning_rate=rate)"},
    ]
    _, keys, _ = read_foreign([written(tmp_path / "a.ipynb", json.dumps({"cells": cells}))])
    assert keys == {"learning_rate": 1e-5}


@pytest.mark.parametrize(
    ("name", "text", "keyword"),
    [
        ("a.py", "x = (", "not Python"),
        ("a.ipynb", "[]", "not a notebook"),
        ("a.sh", "echo 'a", "not a command line"),
        ("a.sh", "trl vllm-serve --model a", "want one command"),
        ("a.py", "print(1)", "one call of GRPOConfig"),
        ("a.py", "GRPOConfig(seed=1)\nGRPOConfig(seed=2)", "lines 1, 2"),
        ("a.toml", "a = [", "not TOML"),
        ("a.json", "[1]", "this is list"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.ini", "a", "want a file"),
        ("a.toml", "steps = 3", "neither prime-rl's"),
        ("a.toml", '[optim]\nlr = 1\n[data]\nname = "x"', "supervised"),
        ("a.toml", 'max_steps = 5\n[inference]\n[data]\nname = "x"\n[eval]\ninterval = 2', "supervised"),
        ("a.toml", '[slurm]\njob_name = "x"\n[data]\ntype = "fake"', "supervised"),
        ("a.toml", 'model = "x"\n[[eval.source]]\nname = "y"', "for evaluations"),
        ("a.toml", "[inference.vllm]\nmax_model_len = 5", "trains none"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, keyword: str) -> None:
    said = refusal(written(tmp_path / name, text))
    assert keyword in said and name in said


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(str(tmp_path / "none.toml"))


def test_numbers_of_yaml_without_a_dot_are_numbers(tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", "learning_rate: 1e-6\nrun_name: 1e\nnum_generations: 4\n")
    assert read_foreign([file]).keys == {"learning_rate": 1e-6, "run_name": "1e", "num_generations": 4}


def test_files_of_components_are_read_as_sections(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "orch.toml", 'batch_size = 8\n[model]\nname = "m"\n[[env]]\nid = "game"\n'),
        written(tmp_path / "train.toml", "[optim]\nlr = 1e-5\n[model]\nseq_len = 64\n"),
        written(tmp_path / "infer.toml", "[vllm]\nmax_model_len = 32\n"),
    ]
    trainer, keys, _ = read_foreign(files)
    assert trainer.name == "prime-rl" and keys == {
        "orchestrator.batch_size": 8,
        "orchestrator.model.name": "m",
        "orchestrator.env.0.id": "game",
        "trainer.optim.lr": 1e-5,
        "trainer.model.seq_len": 64,
        "inference.vllm.max_model_len": 32,
    }


def test_arguments_of_trl_that_prime_rl_has_as_tables_are_trl_s(tmp_path: Path) -> None:
    assert read_foreign([written(tmp_path / "a.yaml", "optim: adamw_torch\nbeta: 0.1\n")]).trainer.name == "TRL"


def test_files_of_two_trainers_are_refused(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "a.toml", "[trainer]\n[orchestrator]\nbatch_size = 8"),
        written(tmp_path / "b.yaml", "beta: 1"),
    ]
    assert "different trainers" in refusal(*files)


def test_a_file_without_an_end_is_refused() -> None:
    assert "is longer than 10,000,000 characters, so it is no config" in refusal("/dev/zero")

"""Models and datasets of the hub: fetched by the real clients from a stand-in for it, and then had without it."""

import json
import os
import subprocess
import sys

import pytest

from tests.fixtures.hub import hub

pytestmark = pytest.mark.engine
ROWS = [{"prompt": f"{number} + 1", "answer": str(number + 1)} for number in range(3)]
DATASET = """
from own_data.taskset import OwnDataConfig, OwnDataTaskset
print([task.data.answer for task in OwnDataTaskset(OwnDataConfig(id="own_data", hub="some/sums"))])
"""
MODEL = """
import sys
from flows.cli import main
from tasks.inference.engine.model_info import model_directory
print(sorted(path.name for path in model_directory("some/model").iterdir()))
sys.exit(main(["run", "demo", "--store", sys.argv[1], "model.path=some/other"]))
"""


def ask(program, place, **variables):
    """Run a program that knows the hub's address and keeps its cache in `place`."""
    # The clients read where the hub is as they are imported: a process of its own.
    given = os.environ | {"HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "0"} | variables
    argv = [sys.executable, "-c", program, str(place / "store")]
    return subprocess.run(argv, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_a_dataset_is_downloaded_once_and_then_read_from_the_cache(tmp_path):
    data = tmp_path / "hub/datasets/some/sums"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    with hub(tmp_path / "hub") as (url, asked):
        first = ask(DATASET, tmp_path, HF_ENDPOINT=url)
    assert first.stdout.strip() == "['1', '2', '3']", first.stderr
    assert [each for each in asked if each.startswith("GET") and each.endswith("train.jsonl")]
    again = ask(DATASET, tmp_path, HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout, again.stderr


def test_a_model_is_fetched_while_a_run_is_prepared_and_one_that_is_not_there_is_refused(tmp_path):
    model = tmp_path / "hub/models/some/model"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "training.log"):
        (model / name).write_text("{}", encoding="utf-8")
    with hub(tmp_path / "hub") as (url, asked):
        done = ask(MODEL, tmp_path, HF_ENDPOINT=url)
    assert done.stdout.splitlines()[0] == "['config.json', 'model.safetensors', 'tokenizer.json']", done.stderr
    assert not [each for each in asked if each.endswith("training.log")], "what no model needs is left there"
    assert done.returncode == 2 and "some/other is no directory, and no model" in done.stderr

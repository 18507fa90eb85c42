"""What an environment may put on a trace, what the sampling process never sees, and the phases of a rollout."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from configs.environments import EnvironmentConfig
from storage.schemas.stage_tables import MESSAGES
from tasks.advantage.algorithms.echo import tool_names
from tasks.arrays.message_graph import find_branches
from tasks.inference.environments import servers as environments
from tests.fixtures.flagged import flagged
from tests.fixtures.hosts import config_of, examples_of, served
from tests.fixtures.sampled import sampled

pytestmark = [pytest.mark.engine, pytest.mark.essential]

ROOT = Path(__file__).parents[4]


@pytest.mark.usefixtures("plugins")
def test_one_note_that_cannot_be_written_takes_no_other_rollout_with_it(small_engine, view, tmp_path):
    environment = EnvironmentConfig(name="odd", taskset={"id": "odd_notes"})
    traces, _ = sampled(small_engine, environment, view, tmp_path, num_examples=6, group_size=1, max_attempts=1)
    rows = {row["example_id"]: row for row in traces}
    notes = {name: json.loads(row["info"]).get("note") for name, row in rows.items()}
    assert notes["plain"] == {"a": [1, 2.5, None, True]} and math.isnan(notes["number"])
    assert notes["bytes"] == "/wA=" and notes["keys"] == {"1": "one", "/wA=": {"two": 2}}
    for name in ("plain", "number", "bytes", "keys"):
        assert (rows[name]["reward"], rows[name]["error_class"]) == (1.0, None)
        assert json.loads(rows[name]["record"])["task"]["data"]["unheard_of"] == {"kept": [1, None, "é"]}
    for name in ("object", "half"):
        assert rows[name]["error_class"] is not None and rows[name]["reward"] is None, "an error, not a zero"


def test_sampling_imports_no_environment(small_engine, models, tmp_path):
    environment = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 2})
    environments.write_rows(tmp_path / "examples.arrow", examples_of(environment))
    config = config_of(models["a"], environment, max_tokens=6)
    with served(environment, tmp_path) as told:
        asked = {
            "examples": str(tmp_path / "examples.arrow"),
            "config": config.model_dump(mode="json"),
            "engine": small_engine.url,
            **told,
        }
        argv = [sys.executable, "-m", "tests.fixtures.sampling_program"]
        done = subprocess.run(argv, input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ended"] == [None, None] and "verifiers" in answer["packages"]
    assert not {"sample_reverse_text", "chat_loop", "torch", "vllm"} & set(answer["packages"])


@pytest.mark.usefixtures("plugins")
def test_phases_and_parts_of_a_rollout_are_told_apart(small_engine, models, view, tmp_path):
    environment = EnvironmentConfig(name="phases", taskset={"id": "phases"})
    (row,), messages = sampled(small_engine, environment, view, tmp_path, group_size=1)
    check_phases(row)
    table = pa.Table.from_pylist(messages, schema=MESSAGES.arrow)
    graph = find_branches(table, np.zeros(len(messages), np.int64))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert tool_names(table, graph) == {3: "look"}, "by the call that it answers"
    tokenizer = Tokenizer.from_file(str(models["a"] / "tokenizer.json"))
    for message in messages:
        assert len(message["is_content"]) == len(message["token_ids"])
        said = flagged(message["token_ids"], message["is_content"])
        if message["role"] != "assistant":  # a call is content too, in the template's own words
            assert tokenizer.decode(said, skip_special_tokens=False) == message["content"]


def check_phases(row):
    """Set-up, generation, model calls and scoring: none holds the time of another, but generation that of its calls."""
    timing = json.loads(row["record"])["timing"]
    spans = [(timing[name]["start"], timing[name]["end"]) for name in ("boot", "setup", "agent", "scoring")]
    assert all(start <= end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "one after the other"
    boot, setup, agent, scoring = (end - start for start, end in spans)
    assert row["setup_seconds"] == pytest.approx(boot + setup) and row["setup_seconds"] >= 0.3
    assert row["scoring_seconds"] == pytest.approx(scoring) and row["scoring_seconds"] >= 0.2
    assert row["generation_seconds"] == pytest.approx(agent) and 0 < row["model_seconds"] <= agent

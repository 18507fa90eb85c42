"""What an environment may put on a trace, and what of an environment the sampling process never sees."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from configs.environments import EnvironmentConfig
from configs.run import View
from storage.schemas.stage_tables import MESSAGES
from tasks.advantage.algorithms.echo import tool_names
from tasks.arrays.message_graph import find_branches
from tasks.inference.engine.client import Engine
from tests.fixtures.sampled import sampled

pytestmark = [pytest.mark.engine, pytest.mark.essential]

ROOT = Path(__file__).parents[4]


@pytest.mark.usefixtures("plugins")
def test_phases_and_parts_of_a_rollout_are_told_apart(
    small_engine: Engine, models: dict[str, Path], view: Callable[..., View], tmp_path: Path
) -> None:
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
        said = [token for token, inside in zip(message["token_ids"], message["is_content"], strict=True) if inside]
        if message["role"] != "assistant":  # a call is content too, in the template's own words
            assert tokenizer.decode(said, skip_special_tokens=False) == message["content"]


def check_phases(row: dict[str, Any]) -> None:
    """Set-up, generation, model calls and scoring: none holds the time of another, but generation that of its calls."""
    timing = json.loads(row["record"])["timing"]
    spans = [(timing[name]["start"], timing[name]["end"]) for name in ("boot", "setup", "agent", "scoring")]
    assert all(start <= end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "one after the other"
    boot, setup, agent, scoring = (end - start for start, end in spans)
    assert row["setup_seconds"] == pytest.approx(boot + setup) and row["setup_seconds"] >= 0.3
    assert row["scoring_seconds"] == pytest.approx(scoring) and row["scoring_seconds"] >= 0.2
    assert row["generation_seconds"] == pytest.approx(agent) and 0 < row["model_seconds"] <= agent

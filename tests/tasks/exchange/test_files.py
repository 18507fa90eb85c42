"""Files of lines: what is no episode is named by its line, and the order of good lines stays."""

import json
from pathlib import Path

import pytest

from tests.tasks.exchange.lines import one, read

BAD = [
    ("{", "the line is not JSON"),
    ("[1]", "the line is no JSON object"),
    ('{"text": "hello"}', "the line is neither an episode nor a trace"),
    ('{"prompt": "x", "completion": "y", "reward": 1}', "the line is neither an episode nor a trace"),
    ('{"nodes": []}', "a trace has no id"),
    ('{"nodes": [], "id": "\\ud83d"}', "the line is not UTF-8"),
    (
        json.dumps(one(lambda trace: trace.update(rewards={"r": {"score": True, "weight": 1}}))),
        "what should be a number",
    ),
]


@pytest.mark.parametrize(("text", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_line_is_named(text: str, reason: str, tmp_path: Path) -> None:
    episodes, (problem,) = read(tmp_path / "t.jsonl", ["", one(), text])
    assert [episode.origin.line for episode in episodes] == [2]
    assert problem.line == 3 and problem.reason.startswith(reason)


def test_no_reward_is_not_a_reward_of_zero(tmp_path: Path) -> None:
    zero = {"similarity": {"score": 0, "weight": 1.0}}
    lines = [one(lambda trace: trace.update(rewards={})), one(lambda trace: trace.update(rewards=zero))]
    episodes, _ = read(tmp_path / "t.jsonl", lines)
    assert [episode.traces[0]["reward"] for episode in episodes] == [None, 0.0]

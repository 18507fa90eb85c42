"""Kernels and bytes of a row, counted on meta tensors: what adds a pass over the logits fails here, without a GPU.

The counts are those of `roofline.json`, of two layers of each shape. Where a change is meant to move them,
`python -m tests.tasks.learner.test_roofline` writes them again.
"""

import json
from pathlib import Path

import pytest

from benchmarks.learner_gpu import roofline

pytestmark = pytest.mark.engine

GOLDEN = Path(__file__).with_name("roofline.json")
SHAPES = ("0.6B", "4B")


def counts(shape):
    return roofline(shape, tokens=16384, segments=8, layers=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_takes_the_kernels_and_bytes_that_are_written_down(shape):
    assert counts(shape) == json.loads(GOLDEN.read_text())[shape]


def test_one_more_pass_over_the_logits_is_seen(monkeypatch):
    from tasks.learner import head

    plain = head._log_softmax
    monkeypatch.setattr(head, "_log_softmax", lambda logits: plain(logits.mul_(1.0)))
    found, golden = counts("0.6B"), json.loads(GOLDEN.read_text())["0.6B"]
    # Each pass reads and writes the logits in float32, forward and again backward.
    passes = 2 * 2 * 4 * (16384 - 8) * 151936
    assert found["bytes"]["head"] == golden["bytes"]["head"] + passes
    assert found["kernels"]["head"] > golden["kernels"]["head"]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({shape: counts(shape) for shape in SHAPES}, indent=2) + "\n")

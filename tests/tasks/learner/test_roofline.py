"""Kernels and bytes of a row, counted without a GPU: a change that adds a pass over the logits fails here.

The counts are those of `roofline.json`, of two layers of each shape; those of three say what each further one takes.
Where a change is meant to move them, `python -m tests.tasks.learner.test_roofline` writes them again.
"""

import json
from pathlib import Path

import pytest

from benchmarks.learner_roofline import roofline
from configs.losses import GspoLoss

pytestmark = pytest.mark.engine

GOLDEN = Path(__file__).with_name("roofline.json")
LAYERS = 28
CASES = {
    "0.6B": {"shape": "0.6B", "compiled": True, "layers": 2},
    "0.6B of three layers": {"shape": "0.6B", "compiled": True, "layers": 3},
    "0.6B with a loss of sequences": {"shape": "0.6B", "compiled": True, "layers": 2, "loss": GspoLoss()},
    "4B": {"shape": "4B", "compiled": True, "layers": 2},
    "0.6B not compiled": {"shape": "0.6B", "compiled": False, "layers": 2},
}


def counts(case):
    return roofline(tokens=16384, segments=8, **CASES[case])


def golden(case):
    return json.loads(GOLDEN.read_text())[case]


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each == "0.6B not compiled" else pytest.mark.nightly) for each in CASES]
)
def test_a_row_takes_the_kernels_and_bytes_that_are_written_down(case):
    assert counts(case) == golden(case)


def test_a_row_of_the_small_model_takes_1500_kernels_and_150_gb_at_most():
    """Each further layer is like the third."""
    two, three = (golden(case) for case in ("0.6B", "0.6B of three layers"))
    for what, most in (("kernels", 1500), ("bytes", 150e9)):
        of_two, of_three = (sum(each[what].values()) for each in (two, three))
        assert of_two + (LAYERS - 2) * (of_three - of_two) <= most
    assert two["kernels"]["head"] == three["kernels"]["head"]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: counts(case) for case in CASES}, indent=2) + "\n")

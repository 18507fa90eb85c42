"""The table of faults has a row for each case, below the test that plants it."""

from dataclasses import replace

from tests.fixtures.faults import Fault, page

ONE = Fault(
    "disk", "a disk is full", "one message", "CI", "tests/a/test_a.py::test_full[a | b]", "ENOSPC <1>", "passed"
)


def test_cases_of_a_test_are_rows_below_its_name():
    text = page([ONE, replace(ONE, test="tests/b/test_b.py::test_cut", receipt="x" * 100, result="failed")])
    assert "2 faults: 1 passed, 1 failed." in text
    assert "**a disk is full.** Must come out: one message. `tests/a/test_a.py`, `test_full`" in text
    assert "| a \\| b | ENOSPC &lt;1> | CI | passed |" in text and f"| - | {'x' * 69}... | CI | failed |" in text

"""The table of faults keeps what it held of tests that were not run, and takes the rest from those that were."""

from dataclasses import replace

from tests.fixtures.faults import Fault, join, page, read_page

ONE = Fault(
    "disk", "a disk is full", "one message", "CI", "tests/a/test_a.py::test_full[local]", "ENOSPC <1>", "passed"
)
OTHER = replace(ONE, test="tests/a/test_a.py::test_full[a | b]", receipt="x" * 100)
ALONE = Fault("log", "a log is cut", "said", "test", "tests/b/test_b.py::test_cut", "3 | 4 bytes", "passed")


def test_a_table_that_was_read_is_written_as_it_was():
    text = page([ONE, OTHER, ALONE])
    assert page(read_page(text)) == text
    assert [fault.test for fault in read_page(text)] == [OTHER.test, ONE.test, ALONE.test]


def test_cases_that_were_run_take_the_place_of_their_rows_alone():
    earlier = read_page(page([ONE, OTHER, ALONE]))
    joined = join(earlier, [failed := replace(ONE, receipt="EIO", result="failed")])
    assert failed in joined and len(joined) == 3
    assert "3 faults: 2 passed, 1 failed." in page(joined)

"""Tables read lately: what is kept, what is read again, and what goes first."""

import pyarrow as pa

from tasks.runtime.run_context import RecentTables


class Reader:
    """Counts how often it was asked, by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> pa.Table:
        self.asked.append(name)
        return pa.table({"value": pa.array([len(self.asked)], pa.int64())})


def fetch(recent: RecentTables, reader: Reader, name: str) -> int:
    return int(recent.get(name, lambda: reader(name))["value"][0].as_py())


def test_a_table_is_read_once_while_it_is_kept():
    recent, reader = RecentTables(), Reader()
    assert [fetch(recent, reader, name) for name in ("a", "b", "a", "b")] == [1, 2, 1, 2]
    assert reader.asked == ["a", "b"]


def test_the_one_not_asked_for_longest_goes_first():
    recent, reader = RecentTables(max_bytes=16), Reader()  # two tables of one int64 each
    for name in ("a", "b", "a", "c"):
        fetch(recent, reader, name)
    assert reader.asked == ["a", "b", "c"]
    fetch(recent, reader, "a")
    assert reader.asked == ["a", "b", "c"]  # b went, not a
    fetch(recent, reader, "b")
    assert reader.asked == ["a", "b", "c", "b"]


def test_a_table_larger_than_the_bound_is_given_out_and_not_kept():
    recent, reader = RecentTables(max_bytes=7), Reader()
    assert [fetch(recent, reader, "a"), fetch(recent, reader, "a")] == [1, 2]


def test_a_failed_read_keeps_nothing():
    recent, reader = RecentTables(), Reader()

    def fails() -> pa.Table:
        raise OSError("no such disk")

    for _ in range(2):
        try:
            recent.get("a", fails)
        except OSError:
            continue
        raise AssertionError("the failure was swallowed")
    assert fetch(recent, reader, "a") == 1

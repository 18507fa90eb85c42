"""Logs that are bounded: what is kept, where it goes, and that the service goes on writing without a hole."""

import os

from hypothesis import given
from hypothesis import strategies as st

from flows.services.logs import first_error, keep_newest, last_lines

SECRET = "sk-very-secret-0123"


def test_a_larger_one_keeps_its_newest_bytes_beside_it(tmp_path):
    log, aside = tmp_path / "engine.log", tmp_path / "engine.log.1"
    with log.open("ab", buffering=0) as service:
        service.write(b"old\nnew\n")
        keep_newest(log, 4)
        assert aside.read_bytes() == b"new\n"
        service.write(b"next\n")  # through the file that it had opened before
    note = b"--- the log was larger than 4 bytes: what it held is in engine.log.1\n"
    assert log.read_bytes() == note + b"next\n"
    keep_newest(log, 4)
    assert aside.read_bytes() == b"ext\n"
    assert sorted(os.listdir(tmp_path)) == ["engine.log", "engine.log.1"]


@given(lines=st.lists(st.binary(min_size=1, max_size=40), max_size=30), most=st.integers(200, 400))
def test_nothing_is_lost_between_two_looks(tmp_path_factory, lines, most):
    log = tmp_path_factory.mktemp("logs") / "x.log"
    aside, written = log.with_name("x.log.1"), b""
    with log.open("ab", buffering=0) as service:
        for line in lines:
            service.write(line)
            written += line
            keep_newest(log, most)
            assert log.stat().st_size <= most
    kept = (aside.read_bytes() if aside.exists() else b"") + log.read_bytes().rpartition(b"is in x.log.1\n")[2]
    assert written.endswith(kept) and len(kept) >= min(len(written), most - 100)


def test_a_disk_that_is_full_costs_what_the_log_held(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"12345")
    log.with_name("engine.log.1").symlink_to("/dev/full")
    keep_newest(log, 4)
    assert log.read_text() == (
        "--- the log was larger than 4 bytes: what it held is lost: [Errno 28] No space left on device\n"
    )


def test_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log, {}) == []
    log.write_text("".join(f"line {number} {SECRET}\n" for number in range(50)))
    assert last_lines(log, {"HF_TOKEN": SECRET}, 2) == ["line 48 ***", "line 49 ***"]
    assert last_lines(log, {"PORT": SECRET}, 1) == [f"line 49 {SECRET}"]


def test_the_first_error_since_the_last_start_is_the_cause(tmp_path):
    log = tmp_path / "log"
    assert first_error(log, {}) == ""
    earlier = "--- engine, generation 1\nValueError: of another start\n"
    log.write_text(earlier + "--- engine, generation 2\nUserWarning: no error\n")
    assert first_error(log, {}) == ""
    cause = f"torch.OutOfMemoryError: no memory for {SECRET}"
    logged = f"(EngineCore pid=7) ERROR 11-24 07:13:16 [core.py:1433] {cause}\nRuntimeError: see above\n"
    for lines in (logged, f"{cause}\nRuntimeError: see above\n"):
        log.write_text(earlier + "--- engine, generation 2\nTraceback (most recent call last):\n" + lines)
        assert first_error(log, {"HF_TOKEN": SECRET}) == "torch.OutOfMemoryError: no memory for ***"


def test_a_line_as_long_as_a_log_is_shown_without_its_middle_and_without_a_cut_secret(tmp_path):
    log = tmp_path / "log"
    log.write_text("x" * 1000 + SECRET + "y" * (64 * 1024 - 10))  # the last ten characters of the secret are read
    (line,) = last_lines(log, {"HF_TOKEN": SECRET})
    assert set(line.replace(" characters", "")) <= set("y []0123456789") and 500 < len(line) < 530
    log.write_text("z" * 501)
    assert last_lines(log, {}) == ["z" * 250 + " [1 characters] " + "z" * 250]

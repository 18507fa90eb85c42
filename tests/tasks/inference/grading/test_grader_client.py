"""Asking a grader: what comes before the answer, and a grader that goes away, stands still or refuses."""

import json
import threading
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path

import pyarrow as pa
import pytest

from tasks.inference.grading import client as regrading
from tasks.inference.grading.client import SCORES, GraderLost, GraderStalled, scores, write_rows

ROWS = {name: pa.table({"x": [1]}) for name in ("examples", "traces", "messages")}
SCORE = {**dict.fromkeys(SCORES.names), "trace_id": "t", "rewards": "{}", "metrics": "{}", "info": "{}", "seconds": 0.5}


@contextmanager
def grader(*answers, stay=False):
    """Answer one request as told, then hang up, or with `stay` keep silent; yield the address."""
    done = threading.Event()

    def serve(listener):
        with listener.accept() as connection:
            directory = Path(json.loads(connection.recv_bytes())["directory"])
            assert sorted(file.name for file in directory.iterdir()) == [
                "examples.arrow",
                "messages.arrow",
                "traces.arrow",
            ]
            write_rows(directory / "scores.arrow", pa.Table.from_pylist([SCORE], schema=SCORES))
            for answer in answers:
                connection.send_bytes(json.dumps(answer).encode())
            if stay:
                done.wait(60)

    with Listener(("127.0.0.1", 0), authkey=b"key") as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.address[1]}"
        done.set()
        thread.join()


def test_work_that_goes_on_is_waited_for():
    with grader({"working": True}, {"working": True}, {"scored": 1}) as address:
        assert scores(address, "key", ROWS).to_pylist() == [SCORE]


def test_one_that_hangs_up_is_lost():
    with grader({"working": True}) as address, pytest.raises(GraderLost, match="went away while it worked"):
        scores(address, "key", ROWS)


def test_one_that_is_not_there_is_lost():
    with Listener(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.address[1]}"
    with pytest.raises(GraderLost, match=address):
        scores(address, "key", ROWS)


def test_one_that_stands_still_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(regrading, "STALL_SECONDS", 0.2)
    with grader({"working": True}, stay=True) as address, pytest.raises(GraderStalled, match="what was recorded is as"):
        scores(address, "key", ROWS)

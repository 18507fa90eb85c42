"""SQL over a store: pruned, pushed down, read-only, and with the database's own words where it is wrong."""

import resource
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import StoreError
from storage.read import sql as storage_sql
from storage.read.frames import Frames
from storage.read.query_limits import Bounds
from storage.read.sql import QuestionError, ask, columns_of
from storage.schemas.stage_tables import TABLES
from storage.store import open_store
from tests.fixtures.commands import cases
from tests.fixtures.histories import add, share

PER_TOKEN = {
    "messages": {"token_ids", "mask", "is_content", "logprobs"},
    "samples": {"path", "advantages", "rl_weights", "ce_weights", "ref_kl_weights"},
    "policies": {"probe_token_ids", "probe_logprobs"},
    "token_statistics": {"logprobs", "entropies"},
    "token_masks": {"masked"},
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """Run `a` with two pieces of work; run `my-replay` shares one of them and has one of its own."""
    store = open_store(tmp_path_factory.mktemp("asked") / "my store")
    add(store, "1", "a", count=3)
    add(store, "2", "a", count=4)
    share(store, "1", "my-replay")
    add(store, "3", "my-replay", count=5)
    return Frames(store)


def rows(frames, sql, tokens=False):
    return ask(frames, sql, tokens).to_pylist()


def test_tables_go_by_name_and_rows_are_there_once(frames):
    found = rows(frames, "select run, count(*) as num, sum(seq) as total from messages group by run order by run")
    assert found == [{"run": "a", "num": 7, "total": 9}, {"run": "my-replay", "num": 5, "total": 10}]


def test_the_rows_of_a_run_are_those_that_it_uses(frames):
    used = 'select key, count(*) as num from "my-replay".messages group by key order by key'
    assert rows(frames, used) == [{"key": "1", "num": 3}, {"key": "3", "num": 5}]
    assert rows(frames, "select count(*) as num from a.messages") == [{"num": 7}]
    assert rows(frames.run("my-replay"), "select count(*) as num from messages") == [{"num": 8}]
    both = (
        "select u.run, count(*) as num from messages m join uses u on u.attempt = m.attempt"
        " where u.\"table\" = 'messages' group by u.run order by u.run"
    )
    assert rows(frames, both) == [{"run": "a", "num": 7}, {"run": "my-replay", "num": 8}]


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
def test_columns_per_token_are_left_out_unless_asked_for(frames, name):
    stored = TABLES[name].stored.names
    assert columns_of(frames, name) == [column for column in stored if column not in PER_TOKEN[name]]
    assert ask(frames, f"select * from {name}").column_names == columns_of(frames, name)
    assert ask(frames, f"select * from {name}", tokens=True).column_names == stored


def test_an_error_says_how_to_get_them(frames):
    with pytest.raises(QuestionError, match='"token_ids" not found') as caught:
        ask(frames, "select token_ids from messages")
    assert "add --tokens" in str(caught.value)
    assert rows(frames, "select token_ids from messages where key = '1' and seq = 0", tokens=True) == [
        {"token_ids": [0, 1, 2]}
    ]


def spoil(path, columns=""):
    """Overwrite the bytes of the columns of a file whose names begin so."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    data = bytearray(path.read_bytes())
    for chunk in (group.column(place) for place in range(group.num_columns)):
        if chunk.path_in_schema.startswith(columns):
            first = chunk.dictionary_page_offset or chunk.data_page_offset
            data[first : first + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def test_one_column_of_twenty_steps_does_not_read_tokens(store, root):
    for step in range(20):
        add(store, str(step), count=4)
    for path in (root / "tables/messages").glob("run=*/*.parquet"):
        spoil(path, "token_ids")
    frames = Frames(open_store(root))
    question = "select step, count(*) as num from messages where role = 'user' group by step order by step"
    assert rows(frames, question, tokens=True) == [{"step": step, "num": 2} for step in range(20)]
    assert rows(frames, "select max(length(content)) as longest from messages") == [{"longest": 7}]
    with pytest.raises(StoreError):
        ask(frames, "select sum(len(token_ids)) from messages", tokens=True)


@cases(__file__, "forbidden")
def test_nothing_but_the_tables_can_be_read_and_nothing_changed(frames, tmp_path, monkeypatch, sql):
    root = Path(frames.store.root.address)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()  # where the database would spill to, and so could read
    (tmp_path / ".tmp/spilled.csv").write_text("a\n1\n")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(QuestionError):
        ask(frames, sql.replace("{root}", str(root)))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == [".tmp"]
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == ["spilled.csv"]


FOREVER = "select count(*) from range(100000000000) a, range(1000) b"


@cases(__file__, "bounds")
def test_a_question_ends_at_its_bounds(frames, sql, bounds, words):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(QuestionError, match=words) as caught:
        ask(frames, sql, bounds=Bounds(**bounds))
    assert caught.value.safe == "the store was only read"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert ask(frames, "select * from range(1000)", bounds=Bounds(rows=1000, seconds=60)).num_rows == 1000


def test_ctrl_c_that_another_thread_receives_ends_a_question(frames, monkeypatch):
    """The thread that waits is not woken by it, as it is not by one that comes just before it waits."""
    answer = storage_sql._answer

    def interrupted(*given):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return answer(*given)

    monkeypatch.setattr(storage_sql, "_answer", interrupted)
    limit, begun = 60.0, time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(frames, FOREVER, False, Bounds(seconds=limit))
    assert time.monotonic() - begun < limit, "it ended at its limit, and the signal was handled after that"


def test_a_stricter_limit_of_the_process_stands(frames, monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**30))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert rows(frames, "select 1 as one") == [{"one": 1}]
    assert limits == [(2**20, 2**30)] * 2


@cases(__file__, "errors")
def test_errors_are_the_databases_with_what_to_do(frames, sql, words):
    with pytest.raises(QuestionError, match=words) as caught:
        ask(frames, sql)
    assert caught.value.safe == "the store was only read" and caught.value.do


def test_runs_that_differ_by_case_alone_are_not_mixed_up(store):
    add(store, "1", "a", count=3)
    add(store, "9", "A", count=1)
    frames = Frames(store)
    assert [rows(frames, f"select count(*) as num from {run}.messages") for run in "aA"] == [[{"num": 3}], [{"num": 1}]]
    with pytest.raises(QuestionError, match="already exists"):
        ask(frames, "select count(*) from a.messages, A.messages")
    assert rows(Frames(store).run("A"), "select count(*) as num from messages") == [{"num": 1}]


def test_sums_are_integers_and_times_are_in_utc(frames):
    answer = ask(frames, "select sum(step) as steps, max(started_at) as latest from ledger")
    assert answer.schema.field("steps").type == pa.int64()
    assert answer.schema.field("latest").type == pa.timestamp("us", tz="UTC")
    assert ask(frames, "select sum(9223372036854775807) as sum from range(3)")["sum"][0].as_py() == 3 * (2**63 - 1)

"""The store over S3: what an object store alone can do to us."""

import json
import socket
import subprocess
import sys

import pyarrow as pa
import pytest

from flows.cli import doctor
from storage.errors import LayoutError, StoreError, StoreUnavailable
from storage.ledger import Ledger
from storage.read.groups import open_groups
from storage.store import LAYOUT, Store, open_store
from tests.fixtures.packed import batches, sample
from tests.fixtures.rows import append, entry
from tests.fixtures.s3_host import S3Host
from tests.fixtures.writer import race_writers

pytestmark = pytest.mark.engine


@pytest.fixture
def root(s3_root):
    return s3_root


@pytest.fixture
def store(root):
    return open_store(root)


def fill(store: Store, steps: range) -> None:
    for step in steps:
        piece = append(store, 2, step=step, key=f"k{step}", attempt=f"a{step}")
        store.ledger.commit(entry(f"k{step}", step=step, outputs=(piece,)))


def test_packed_rows_are_read_row_by_row_with_the_credentials_of_the_environment(root, store):
    rows = batches([[sample(f"s{number}", 5 + number, number)] for number in range(4)])
    pieces = [
        store.append("batches", rows.slice(first, 2), run="run", step=0, key="k", attempt="a") for first in (0, 2)
    ]
    reader = open_groups(root)
    found = [group for piece in pieces for group, _ in reader.verify(piece)]
    assert pa.concat_tables([reader.read(group) for group in found]).equals(rows)


def test_the_first_to_make_a_store_decides(s3, root, store):
    assert store.root.create("format.json", b"another") is False
    assert json.loads(s3.get(f"{root}/format.json")) == {"layout": LAYOUT}
    assert store.root.create("once", b"one") is True
    assert store.root.create("once", b"two") is False
    assert store.root.read("once") == b"one"
    store.root.delete("once")
    assert not store.root.exists("once")
    fill(store, range(1))
    assert store.root.exists("tables/ledger"), "a directory, too"


@pytest.mark.nightly
def test_two_writers_side_by_side_lose_nothing(root, store):
    count, runs = 50, ("one", "two")
    told = race_writers(root, *(["rows", run, str(count)] for run in runs))
    assert told == [[str(number) for number in range(count)]] * 2
    wanted = {(run, f"{run}-{number}") for run in runs for number in range(count)}
    assert {(found.run, found.key) for found in store.ledger.entries()} == wanted
    rows = [row for each in store.ledger.table.active_files() for row in store.ledger.table.read(each.path).to_pylist()]
    assert len(rows) == len(wanted), "each of them once"


def test_every_commit_is_a_conditional_put(s3, store, monkeypatch):
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")  # what somebody's environment says must not undo it
    s3.requests()
    fill(open_store(s3.new_place()), range(2))
    puts = [each for each in s3.requests() if each.startswith("PUT") and "_delta_log" in each]
    assert len(puts) >= 6, "three tables are made, two steps are committed to two of them"
    assert all(each.endswith("if-none-match") for each in puts)


@pytest.mark.parametrize(("mode", "told"), [("ignored", "wrote over an object"), ("unknown", "501 NotImplemented")])
def test_a_server_without_conditional_puts_is_refused(s3, root, mode, told):
    s3.behave(conditional=mode)
    with pytest.raises(LayoutError, match=f"does not keep writers apart.*{told}") as caught:
        open_store(root)
    assert "lose each other's commits" in caught.value.do
    assert not [each for each in s3.requests() if "/tables/" in each], "no table was made"
    s3.behave()
    fill(open_store(root), range(1))
    s3.behave(conditional=mode)
    with pytest.raises(LayoutError, match="does not keep writers apart"):
        open_store(root)  # a server that changed


@pytest.mark.parametrize("num_lost", [1, 3])
def test_lost_answers_neither_lose_nor_double_a_commit(s3, root, store, num_lost):
    s3.behave(lost=str(num_lost))
    fill(store, range(2))
    assert [found.step for found in open_store(root).ledger.entries()] == [0, 1]
    assert store.scan("messages").collect().height == 4
    rows = [store.ledger.table.read(each.path).num_rows for each in store.ledger.table.active_files()]
    assert sum(rows) == 2


def test_a_conflict_is_not_taken_for_an_object_that_is_there(s3, store):
    """S3 answers 409 to a conditional put beside another one, which may fail: then nobody's object is there."""
    s3.behave(conflict="2")
    assert store.root.create("once", b"one") is True
    assert store.root.read("once") == b"one"
    assert store.root.create("once", b"two") is False


def test_an_endpoint_where_nobody_listens_is_an_error(s3, root, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match=r"does not answer.*refused") as caught:
            open_store(root)
    assert "AWS_ENDPOINT_URL" in caught.value.do


def test_a_server_that_goes_away_is_an_error_for_everyone_at_work(store):
    host = S3Host()
    options = {**host.environment}
    mine = open_store(host.new_place(), options)
    fill(mine, range(1))
    pieces = mine.ledger.entries()[0].outputs
    host.stop()
    for work in (lambda: fill(mine, range(1, 2)), lambda: mine.ledger.find("k0"), lambda: mine.read(pieces)):
        with pytest.raises(StoreUnavailable):
            work()
    with pytest.raises(StoreUnavailable):
        mine.policies.find("policy")
    fill(store, range(1))  # the other server is well


@pytest.mark.parametrize(
    ("mode", "bucket", "told"),
    [
        ({}, "nowhere", "404 NoSuchBucket"),
        ({"missing": "all"}, "", "404"),
        ({"denied": "all"}, "", "403 AccessDenied"),
    ],
)
def test_an_answer_that_is_no_object_is_an_error(s3, root, mode, bucket, told):
    s3.behave(**mode)
    with pytest.raises(StoreUnavailable, match=f"answered GET with {told}") as caught:
        open_store(f"s3://{bucket}/store" if bucket else root)
    assert "AWS_REGION" in caught.value.do


def test_the_doctor_asks_the_server(s3, root, monkeypatch):
    assert doctor.disk(root) == f"the store's server answers for {root}, where no store is yet"
    assert not [each for each in s3.requests() if each.startswith("PUT")], "a doctor makes nothing"
    open_store(root)
    assert doctor.disk(root) == f"the store's server answers for {root}"
    monkeypatch.setenv("AWS_ALLOW_HTTP", "")
    with pytest.raises(doctor.Problem, match="AWS_ALLOW_HTTP=true"):
        doctor.disk(root)


def test_who_may_only_read_reads(s3, root, store):
    fill(store, range(1))
    s3.behave(denied="puts")
    reader = open_store(root)
    assert reader.scan("messages").collect().height == 2
    with pytest.raises(StoreError):
        fill(reader, range(1, 2))
    with pytest.raises(StoreError):
        open_store(s3.new_place())


def test_a_stage_s_commit_costs_few_requests(s3, store):
    """What docs/s3.md says: one step of one table, its row in the ledger included, once everything is open."""
    fill(store, range(3))
    s3.requests()
    fill(store, range(3, 4))
    kinds = [each.split()[0] for each in s3.requests()]
    assert (kinds.count("PUT"), len(kinds)) == (5, 9)
    piece = Ledger(store.root).entries()[-1].outputs
    s3.requests()
    store.read(piece)
    assert len(s3.requests()) == 1
    scratch = store.policies.scratch("policy")
    for name in ("config.json", "model.safetensors"):
        (scratch / name).write_bytes(b"x")
    s3.requests()
    store.policies.publish(scratch, "policy")
    kinds = [each.split()[0] for each in s3.requests()]
    assert (kinds.count("PUT"), len(kinds)) == (3, 6)
    store.policies.directory("policy", verify=True)
    assert len(s3.requests()) == 1, "what was just published is its own copy"


def test_a_committing_process_ends_well_every_time(root, store):
    """One process in four aborted at its end when Arrow's threads held on to bytes that Python owned."""
    command = [sys.executable, "-m", "tests.fixtures.writer", root, "rows"]
    for number in range(8):
        done = subprocess.run(
            [*command, f"run-{number}", "1"], input="go\n", capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "ready\n0\n"), done.stderr
    assert len(store.ledger.entries()) == 8

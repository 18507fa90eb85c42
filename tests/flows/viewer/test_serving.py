"""`stagecoach view` as a process: what it prints, who it lets in, how it ends; and what it refuses before it serves."""

import http.client
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import psutil
import pytest

from flows.cli import main
from flows.queries.request import BadQuestion
from flows.viewer.serving import NICENESS, PORT, TOKEN, listen
from storage.store import open_store
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.waiting import PATIENCE
from tests.flows.viewer.looking import viewing

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("served") / "store"
    rehearse(place, "base", steps=1)
    return place


def get(address, **headers):
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=PATIENCE)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.essential
def test_it_serves_behind_a_run_and_ends_at_once_while_somebody_looks(root, sent, status):
    with viewing(root) as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert get(address).status == 200
        niceness = psutil.Process(process.pid).nice()
        assert niceness == min(19, os.nice(0) + NICENESS)
        connections = psutil.Process(process.pid).net_connections()
        assert [each.laddr.ip for each in connections if each.status == "LISTEN"] == ["127.0.0.1"]
        place = "127.0.0.1", urlsplit(address).port
        open_connection = http.client.HTTPConnection(*place, timeout=PATIENCE)
        open_connection.request("GET", "/mark")
        assert b"mark" in open_connection.getresponse().read()  # and it stays open, as a browser's does
        open_connection.putrequest("GET", "/")  # one is just being asked for
        process.send_signal(sent)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert err == "" and "Traceback" not in out
        with pytest.raises(OSError):
            socket.create_connection(place, timeout=1)


def test_other_machines_need_the_token_and_no_line_is_written_for_a_request(root):
    with viewing(root, "--host", "0.0.0.0", "--run", "latest", **{TOKEN: "the given one"}) as (process, address):
        assert address.endswith("/runs/base?token=the%20given%20one")
        here = f"http://127.0.0.1:{urlsplit(address).port}"
        for wrong in ("", "/?token=another"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(here + wrong)
        with pytest.raises(urllib.error.HTTPError, match="421"):
            get(here, host="evil.example", authorization="Bearer the given one")
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opened = visitor.open(f"{here}/?token=the%20given%20one", timeout=PATIENCE)
        assert (opened.status, opened.url) == (200, f"{here}/")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
        assert "token" not in out + err and "GET" not in out + err


def test_without_a_token_of_ones_own_one_is_made(root):
    with viewing(root, "--host", "0.0.0.0", **{TOKEN: ""}) as (_, address):
        assert len(address.partition("?token=")[2]) >= 32


def test_an_unknown_run_is_refused_before_anything_is_served(root, capsys):
    assert main(["view", "--store", str(root), "--run", "nun"]) == 2
    said = capsys.readouterr()
    assert "nun" in said.err and "base" in said.err and said.out == ""


def test_what_is_no_store_is_refused_and_nothing_is_made(tmp_path, command):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "missing", "missing/below"):
        assert "there is no store" in command(tmp_path / name, "view", status=2)
    assert "Not a directory" in command(tmp_path / "file", "view", status=2)
    assert sorted(tmp_path.rglob("*")) == before
    open_store(tmp_path / "store")
    assert "there is no run" in command(tmp_path / "store", "view", "--run", "latest", status=2)


def test_a_port_that_is_taken_is_passed_over_or_told():
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        taken = first.getsockname()[1]
        assert PORT <= taken < second.getsockname()[1]
        with pytest.raises(BadQuestion, match=f"--port {taken}"):
            listen("127.0.0.1", taken)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("no-such.invalid", None)])
def test_what_cannot_be_listened_on_is_told(host, port):
    with pytest.raises(BadQuestion, match="--port"):
        listen(host, port)

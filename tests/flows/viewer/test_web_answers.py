"""What the application answers: pages, JSON and files at every address, and its own words where something is wrong."""

import json
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from flows.queries.store_reader import StoreReader
from flows.viewer.addresses import Page, any_trace
from flows.viewer.app import HEADERS
from flows.viewer.routes import PAGES, parsed_address
from storage.errors import StoreUnavailable
from storage.store import LAYOUT, open_store
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import everything, formed, traces, visitor

pytestmark = pytest.mark.engine
FORMS = ("html", "json", "file")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("answers") / "store"
    rehearse(place, "base")
    rehearse(place, "other", seed=8, steps=1)
    return place


@pytest.fixture(scope="module")
def library(root):
    return StoreReader.at(root)


@pytest.fixture(scope="module")
def client(library):
    return visitor(library)


@pytest.fixture
def made(library, monkeypatch):
    """A way to let an address of traces be answered by a function of the test."""

    def make(read):
        monkeypatch.setitem(PAGES, "any_trace", (PAGES["any_trace"][0], read))
        return visitor(library)

    return make


def protected(answer):
    return all(answer.headers[name] == value for name, value in HEADERS.items())


def state(root):
    """Every file and directory below a root: its size, times and mode, and what it holds."""
    found = {}
    for path in (root, *root.rglob("*")):
        seen = path.lstat()
        found[path] = seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, path.read_bytes() if path.is_file() else b""
    return found


def test_opening_everything_in_every_form_changes_nothing(root, library, client):
    before, found = state(root), everything(library)
    assert {parsed_address(address)[0] for address in found} == {*PAGES} - {
        "evaluation",
        "rewards",
    }  # no reward was tried
    for address in found:
        page, values, file = answers = [client.get(formed(address, form)) for form in FORMS]
        assert {answer.status_code for answer in answers} == {200}, (address, values.text[:300])
        assert all(map(protected, answers))
        assert isinstance(values.json(), dict)
        assert page.headers["content-type"] == file.headers["content-type"] == "text/html; charset=utf-8"
        assert file.headers["content-disposition"].startswith("attachment; filename=")
        assert client.head(address).status_code == 200
    assert client.get("/mark").status_code == 200
    assert state(root) == before
    (root / "format.json").touch()
    assert state(root) != before


def test_a_terminal_changes_nothing(root, library, command):
    trace = next(traces(library, "base"))
    before = state(root)
    for arguments in (["traces", "base"], ["traces", "latest", "--where", "reply ~ 'x'"], ["trace", trace]):
        command(root, *arguments)
    assert state(root) == before


def test_a_store_that_holds_nothing_yet_stays_so(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    (root / "format.json").write_text(json.dumps({"layout": LAYOUT}))
    before, client = state(root), visitor(root)
    for form in FORMS:
        assert client.get(formed("/", form)).status_code == 200
        for address in ("/runs/a", "/runs/a/steps/0", "/traces/x", "/compare?a=a&b=b"):
            assert client.get(formed(address, form)).status_code == 404, address
    first = client.get("/mark").json()
    assert state(root) == before
    store = open_store(root)  # what comes later is seen by the same viewer
    store.runs.record(run="new", event="started", kind="train", config={"name": "new", "steps": 3})
    assert client.get("/mark").json() != first
    for address, status in {"/": 200, "/runs/new": 200, "/runs/new/steps/0": 404, "/compare?a=new&b=new": 200}.items():
        assert client.get(address).status_code == status, address


MISTAKEN = """
404 /nowhere
404 /runs/none
404 /runs/base/steps/99
404 /runs/base/steps/-1
404 /runs/base/steps/one
404 /runs/base/traces/none
404 /runs/base/traces/
404 /traces/a%2Fb%2F..%2F%2e%2e
404 /traces/%00%1b%5B31m%0A%E2%80%AE%F0%9F%98%80%FF
404 /runs/..%2F..%2Fetc%2Fpasswd
404 /compare?a=base&b=none
400 /compare?a=base
404 /compare?a=base&b=other&step=7
400 /compare?a=base&b=other&step=one
404 /runs/base?with=none
400 /runs/base?with=a,b,c,d,e,f,g,h,i
400 /runs/base?x=moon
404 /runs/base/changes?b=99
404 /runs/base/evaluations/0
400 /runs/base/steps/0?sort=beauty
400 /runs/base/steps/0?order=up
400 /runs/base/steps/0?k=51
404 /runs/base/steps/9/batch
400 /runs/base/steps/0/batch?colour=taste
400 /runs/base/steps/0/batch?page=7
404 /runs/base/steps/0/batch?row=99
404 /static/nothing.css
404 /static/..%2Fapp.py
404 /static/%2e%2e/app.py
404 /static//etc/passwd
404 /static/base.css%00
404 /openapi.json
404 /docs
404 /runs/base/steps/\u0661
"""
LONG = ["404 /runs/base/steps/" + "9" * 5000, "404 /traces/" + "x" * 60_000]


@pytest.mark.parametrize("form", ["html", "json"])
@pytest.mark.parametrize("mistaken", [*MISTAKEN.split("\n")[1:-1], *LONG])
def test_what_is_not_there_is_said_on_a_page_of_ours(client, mistaken, form):
    status, address = mistaken.split(" ")
    answer = client.get(formed(address, form))
    assert answer.status_code == int(status), answer.text[:500]
    assert protected(answer) and "Traceback" not in answer.text and "def page" not in answer.text
    assert len(answer.content) < 40_000
    if form == "json":
        assert answer.json()["status"] == int(status)
    else:
        assert "All runs" in answer.text and "\x1b" not in answer.text and "\u202e" not in answer.text


@pytest.mark.parametrize("form", ["HTML", "json,html", "<script>", "x" * 9000])
def test_a_form_that_is_not_known_is_refused(client, form):
    answer = client.get("/", params={"format": form})
    assert answer.status_code == 400 and "<script>" not in answer.text and "html, json, file" in answer.text


@pytest.mark.parametrize(
    "written", ["a/b", "a%b", "..", "a b?c=d#e", "line\nbreak", "ends\n", "\n", "\u202e\x00\x1b", "\U0001f600", "a//b/"]
)
def test_an_id_of_any_text_reaches_the_page(made, written):
    read = Mock(side_effect=lambda library, asked: Page("mistake.html", "seen", {"message": asked.path["trace"]}))
    address = any_trace(written)
    if written == "..":  # a client goes up by itself: the id is then asked for with something behind it
        address += "%00"
        written += "\0"
    client = made(read)
    assert client.get(address + "?format=json&x=1").json() == {"message": written}
    asked = read.call_args.args[1]
    assert asked.address == address and asked.but(x=None) == address
    assert client.get(address).text.count(f"{address}?format=") == 2  # the page's own links to JSON and file


def test_a_fault_of_the_viewer_is_no_traceback_and_no_half_of_a_page(made):
    client = made(Mock(side_effect=KeyError("a secret of the store")))
    for form in ("html", "json", "file"):
        answer = client.get(f"/traces/x?format={form}")
        assert answer.status_code == 500 and protected(answer)
        assert "secret" not in answer.text and "Traceback" not in answer.text and "log of" in answer.text
    loud = TestClient(client.app, base_url="http://127.0.0.1")
    with pytest.raises(KeyError, match="secret"):  # so that the server writes it to its log
        loud.get("/traces/x")
    client = made(lambda library, asked: Page("mistake.html", "x", {}))
    assert client.get("/traces/x").status_code == 500


def test_a_store_that_cannot_be_read_is_told_so(made):
    gone = StoreUnavailable("the disk is gone", "/data<b>", "all", "mount it")
    answer = made(Mock(side_effect=gone)).get("/traces/x")
    assert answer.status_code == 503 and "mount it" in answer.text and "<b>" not in answer.text


def test_files_that_went_while_they_were_read_are_no_fault_of_the_viewer(tmp_path, caplog):
    rehearse(tmp_path / "store", "base")
    for file in (tmp_path / "store" / "tables" / "traces").rglob("*.parquet"):
        file.unlink()
    answer = visitor(tmp_path / "store").get("/runs/base/steps/0")
    assert (answer.status_code, "Traceback" in answer.text) == (503, False)
    assert "files of the store are damaged" in answer.text
    assert "/runs/base/steps/0 could not be answered" in caplog.text and "Traceback" in caplog.text


def test_numbers_that_are_none_and_halves_of_characters_come_through_as_json(made):
    values = {"nan": float("nan"), "inf": [float("-inf")], "half": "\ud800\udc00\ud800", "none": None, "zero": 0}
    client = made(lambda library, asked: Page("mistake.html", "x\ud800", {**values, "message": "\ud800\0"}))
    found = client.get("/traces/x?format=json").json()
    assert found["nan"] == "NaN" and found["inf"] == ["-Infinity"] and found["none"] is None and found["zero"] == 0
    assert client.get("/traces/x").status_code == client.get("/traces/x?format=file").status_code == 200


def test_the_mark_is_another_after_a_commit_and_only_then(tmp_path):
    store = rehearse(tmp_path / "store", "base")
    reader = StoreReader.at(tmp_path / "store")
    client, moment = visitor(reader), reader.still()
    before = len(moment.graph.works), moment.mark
    marks = [client.get("/mark").json()["mark"]]

    def changed():
        marks.append(client.get("/mark").json()["mark"])
        client.get("/")
        return marks[-1] != marks[-2]

    assert not changed()
    store.runs.record(run="base", event="resumed")
    assert changed() and not changed()
    store.quarantines.record(["t"], where="here", reason="so")
    assert changed() and not changed()
    rehearse(tmp_path / "store", "second", seed=9)
    assert changed() and not changed()
    assert len(set(marks)) == 4
    assert (len(moment.graph.works), moment.mark) == before, "a page reads one moment"
    assert len(reader.still().graph.works) > before[0]

"""Notes and tags: written by the command, taken back, shown and found."""

import json
from pathlib import Path

import pytest

from flows.cli.note import note
from flows.queries.conditions import Condition
from flows.queries.notes import notes_of
from flows.queries.request import PageRequest
from flows.queries.rollout_search import search_run
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.pages.runs import run_page
from flows.viewer.pages.search import search_page
from storage.records import REMOVED
from storage.store import open_store
from tests.fixtures.commands import cases
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import answer

HOSTILE = "<script>alert(1)</script> \x1b[31mred"


@pytest.fixture
def store(tmp_path):
    rehearse(tmp_path / "store", "base", steps=1)
    return tmp_path / "store"


def first_trace(store):
    return str(open_store(store).scan("traces").select("trace_id").first().collect().item())


def test_a_note_on_a_run_is_listed_shown_and_taken_back(store, call, monkeypatch):
    name = json.loads(call("note", "base", "length grew", "--tag", "odd", "--tag", "look", "--json")[1])["written"]
    assert f"note {name}" in (shown := call("show", "base")[1]) and "length grew #look #odd" in shown
    monkeypatch.setenv("COLUMNS", "100")
    assert "base #look #odd" in " ".join(call("runs")[1].split())
    assert "length grew" in call("note", "base")[1]
    assert call("note", "base", "--delete", name) == (0, f"deleted: {name}\nbase has no notes\n")
    assert call("note", "base") == (0, "base has no notes\n")


def test_a_note_on_a_rollout_is_on_its_page_and_is_found_by_a_condition(store):
    library, trace = StoreReader.at(store), first_trace(store)
    condition = Condition("tags ~ 'hack' and note ~ 'empty'")
    assert search_run(library, "base", condition).rows.is_empty()
    note("base", f"empty tag {HOSTILE}", trace=trace[:12], tag=("hack",), store=str(store))
    assert search_run(library, "base", condition).rows["trace_id"].to_list() == [trace]
    status, html = answer(library, addresses.trace("base", trace))
    assert status == 200 and "empty tag &lt;script&gt;" in html and "\x1b" not in html and ">hack<" in html
    assert run_page(library, PageRequest("", {"run": "base"})).values["notes"] == [], "it is not on the run"


def test_a_plain_text_finds_notes_of_rollouts(store):
    library, trace = StoreReader.at(store), first_trace(store)
    note("base", "Begins with a YAWN", trace=trace, store=str(store))

    def found(text):
        told = search_page(library, PageRequest("", {"run": "base"}, {"q": text})).values
        return [each["trace_id"] for each in told["hits"]]

    assert found("yawn") == [trace] and found("no such words") == []
    _, html = answer(library, addresses.search("base", "yawn"))
    assert "<mark>YAWN</mark>" in html and addresses.trace("base", trace).partition("?")[0] in html


def test_notes_of_a_removed_run_are_not_those_of_the_next_of_its_name(store):
    note("base", "of the first", store=str(store))
    root = open_store(store)
    root.runs.record(run="base", event=REMOVED)
    assert notes_of(root, "base") == []
    note("base", "of the second", store=str(store))
    assert [each["text"] for each in notes_of(root, "base", "")] == ["of the second"]


@cases(__file__, "notes")
def test_what_makes_no_sense_is_refused(store, call, argv, words):
    status, message = call("note", *argv.split())
    assert status == 2 and words in message
    assert notes_of(open_store(store)) == [] and not Path("none").exists()

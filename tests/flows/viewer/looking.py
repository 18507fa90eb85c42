"""A person who looks at everything: all addresses of a store, and a client that asks for them."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from html.parser import HTMLParser
from itertools import islice, pairwise
from operator import itemgetter

import polars as pl
from starlette.testclient import TestClient

from flows.queries.metrics import metrics, numbers
from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.app import application, respond
from flows.viewer.routes import parsed_address
from storage.read.frames import Frames
from tests.fixtures.programs import ROOT

MOST_EACH = 2
"""Traces and examples of each run that are opened."""
EMPTY = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}
"""Elements without an end."""


@contextmanager
def viewing(root, *arguments, port=0, **environment):
    """A viewer of a store and the address that it printed; it is gone afterwards, whatever happened."""
    # From beside the store: its pages then show no path of this machine. The code is that of this checkout.
    command = [sys.executable, "-P", "-m", "flows.cli", "view", "--store", root.name, "--port", str(port), *arguments]
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)} | environment
    process = subprocess.Popen(command, cwd=root.parent, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        printed = process.stdout.readline()
        found = re.search(r"http://\S+", printed)
        assert found, printed + process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def visitor(store, token="", hosts=()):
    """Return a client of a viewer in this process, which sees an answer where a server would write a traceback."""
    reader = store if isinstance(store, StoreReader) else StoreReader.at(store)
    return TestClient(
        application(reader, hosts, token),
        base_url="http://127.0.0.1:8265",
        raise_server_exceptions=False,
        follow_redirects=False,
    )


def answer(library, address, **query):
    """How an address is answered, with more of a question: the status and the body."""
    name, asked = parsed_address(address)
    found = respond(name, library, PageRequest(asked.address, asked.path, {**asked.query, **query}))
    return found.status_code, bytes(found.body).decode()


def values(library, address, **query):
    """What a page says, as JSON."""
    status, text = answer(library, address, **query, format="json")
    assert status == 200, text
    return json.loads(text)


def pluck(rows, *names):
    """The values of rows by a name, or tuples of those of several names."""
    return [*map(itemgetter(*names), rows)]


def everything(library, *only):
    """Return addresses of all kinds of pages of a store, of every run each or of some alone."""
    runs = only or library.store.runs.names()
    found = [addresses.runs()]
    for run in runs:
        found += _of_run(library, run)
    for a, b in pairwise(runs):
        found += [addresses.compare(a, b, step=0), addresses.compare(a, b)]
    return found


def formed(address, form):
    """The address of a page in another form: html, json or file."""
    page, mark, part = address.partition("#")
    return f"{page}{'&' if '?' in page else '?'}format={form}{mark}{part}"


def one_of_each(library, *only):
    """Return an address of each kind of page."""
    return {parsed_address(address)[0]: address for address in reversed(everything(library, *only))}


def _of_run(library, run):
    yield addresses.run(run)
    for each in metrics(numbers(library, run))[:1]:
        yield addresses.metric(run, each["name"])
    yield addresses.search(run, "reward > -1000")
    yield addresses.changes(run)
    steps = sorted({lineage.traces.step for lineage in library.history(run).lineages if lineage.batches})
    for step in steps:
        yield addresses.step(run, step)
        yield addresses.batch(run, step)
        yield addresses.row(run, step, 0)
    for entry in library.store.ledger.entries(run=run):
        if "evaluation_assignment" in entry.inputs:
            yield addresses.evaluation(run, entry.step)
    for trace in islice(traces(library, run), MOST_EACH):
        yield addresses.trace(run, trace)
        yield addresses.any_trace(trace)
    for environment, example in _examples(library, run):
        yield addresses.example(run, environment, example)


def traces(library, run):
    """The ids of a run's traces."""
    yield from library.frames(run)["traces"].select("trace_id").collect()["trace_id"]


def _examples(library, run):
    columns = [pl.col("environment"), pl.col("example_id")]
    return library.frames(run)["assignments"].select(columns).unique().sort(columns).head(MOST_EACH).collect().rows()


class Elements(HTMLParser):
    """What a page consists of: its elements with the names of their attributes, in order, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.texts, self.odd, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        self.odd += self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.values += [(tag, name, value or "") for name, value in attrs]
        if len({name for name, _ in attrs}) != len(attrs):
            self.odd.append(f"an attribute twice: {tag} {attrs}")
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.odd.append(f"</{tag}>")

    def handle_data(self, data):
        self.texts.append(data)

    def unknown_decl(self, data):
        self.odd.append(f"<!{data[:40]}")

    handle_comment = handle_pi = unknown_decl


def what_is_read(monkeypatch):
    """The tables and steps whose rows are asked for from now on, in order, as they are asked for."""
    read = []
    of = Frames.rows

    def spying(self, works, table):
        works = list(works)
        read.extend((table, work.step) for work in works)
        return of(self, works, table)

    monkeypatch.setattr(Frames, "rows", spying)
    return read

"""What a page does not do unless it is asked: read a large run for one trace, draw twice, show a whole batch."""

import math
from typing import Any

import polars as pl
import pytest

from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses, rendering, serving
from flows.viewer.app import respond
from flows.viewer.pages import batch as batches
from flows.viewer.pages import trace as traces
from flows.viewer.rendering import PAGES
from flows.viewer.svg.charts import chart
from storage.errors import StoreError
from tests.fixtures.rehearsal import rehearse


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    root = tmp_path_factory.mktemp("quick") / "store"
    rehearse(root, "run", steps=2, packing={"tokens_per_row": 64, "data_parallel": 8})
    return StoreReader.at(root)


def about(library: StoreReader, **query: str) -> PageRequest:
    row = (
        library.frames("run")
        .rows([library.history("run").lineages[0].traces], "traces")
        .first()
        .collect()
        .row(0, named=True)
    )
    path = {"run": "run", "trace": row["trace_id"]}
    return PageRequest(addresses.trace("run", row["trace_id"]), path, {"key": row["key"], **query})


def test_a_trace_of_a_large_run_reads_its_history_only_when_asked(
    library: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = traces.trace_page(library, about(library)).values["history"]
    assert whole, "a small run has it at once"
    monkeypatch.setattr(traces, "SMALL_RUN", len(library.history("run").lineages))
    assert traces.trace_page(library, about(library)).values["history"] == whole
    monkeypatch.setattr(traces, "SMALL_RUN", len(library.history("run").lineages) - 1)
    assert traces.trace_page(library, about(library)).values["history"] is None
    for how in ({"history": "1"}, {"format": "json"}, {"format": "file"}):
        assert traces.trace_page(library, about(library, **how)).values["history"] == whole
    text = respond(PAGES["trace"], library, about(library)).body
    assert b"history=1#history" in text and b'id="history"' in text
    assert b'class="attempts"' not in text
    assert b'class="attempts"' in respond(PAGES["trace"], library, about(library, history="1")).body


def test_a_page_of_a_batch_holds_so_many_samples(library: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def per_page(*num_samples: int) -> int:
        return batches.rows_per_page(pl.DataFrame({"num_samples": num_samples}, schema={"num_samples": pl.Int64}))

    assert per_page(0, 0) == per_page(*[20] * 500) == 100
    assert per_page(*[40] * 136) == 50 and per_page(*[5000] * 3) == 1

    asked = PageRequest(addresses.batch("run", 0), {"run": "run", "step": "0"}, {})
    whole = batches.batch_page(library, asked).values["rows"]
    monkeypatch.setattr(batches, "MOST_SAMPLES", 6)
    first = batches.batch_page(library, asked).values
    pages = [
        batches.batch_page(library, PageRequest(asked.address, asked.path, {"page": str(n)})).values
        for n in range(first["num_pages"])
    ]
    assert len(pages) > 1 and [row for each in pages for row in each["rows"]] == whole


def told(value: float | None, title: str = "Reward") -> dict[str, Any]:
    return {"title": title, "series": [{"name": "mean", "values": [1.0, value]}]}


def test_a_chart_is_drawn_again_only_where_it_says_something_else() -> None:
    steps = [{"step": n, "address": f"/runs/a/steps/{n}", "finished": True} for n in range(2)]
    first = chart(told(2.0), steps)
    assert chart(told(2.0), [dict(each) for each in steps]) is first
    assert len({first, chart(told(2.5), steps), chart(told(None), steps), chart(told(math.nan), steps)}) == 4
    assert chart(told(2.0, "Loss"), steps) != first
    moved = [{**each, "address": f"/runs/b/steps/{each['step']}"} for each in steps]
    assert "/runs/b/steps/1" in chart(told(2.0), moved) and "/runs/a/" not in chart(told(2.0), moved)


def test_warming_reads_the_ledger_and_compiles_every_template(library: StoreReader) -> None:
    rendering.templates.cache_clear()
    fresh = StoreReader(library.store)
    thread = serving.warm_in_background(fresh)
    thread.join()
    assert thread.daemon and fresh._moment is not None
    found = rendering.templates()
    names = {path.name for path in rendering.TEMPLATES.glob("*.html")}
    assert found.cache is not None and {name for _, name in found.cache} == names


def test_warming_leaves_what_is_wrong_to_the_first_page(library: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(self: StoreReader) -> None:
        raise StoreError("the ledger is torn")

    monkeypatch.setattr(StoreReader, "moment", torn)
    serving.warm(library)
    found = respond(PAGES["runs"], library, PageRequest("/"))
    assert found.status_code == 503 and b"the ledger is torn" in found.body

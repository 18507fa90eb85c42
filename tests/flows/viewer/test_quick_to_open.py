"""Opening pages fast: the history of a large run is read on request alone, and templates are compiled before."""

from typing import Any

import pytest

from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses, rendering, serving
from flows.viewer.pages.trace import trace_page
from flows.viewer.rendering import parsed_address
from storage.errors import StoreError
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import answer, traces


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    root = tmp_path_factory.mktemp("quick") / "store"
    rehearse(root, "run", steps=2, packing={"tokens_per_row": 64, "data_parallel": 8})
    return StoreReader.at(root)


def test_a_trace_of_a_large_run_reads_its_history_only_when_asked(
    library: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, num_batches = addresses.trace("run", next(traces(library, "run"))), len(library.history("run").lineages)

    def history(**query: str) -> Any:
        _, asked = parsed_address(address)
        return trace_page(library, PageRequest(asked.address, asked.path, query)).values["history"]

    whole = history()
    assert whole, "a small run has it at once"
    monkeypatch.setattr("flows.viewer.pages.trace.SMALL_RUN", num_batches)
    assert history() == whole
    monkeypatch.setattr("flows.viewer.pages.trace.SMALL_RUN", num_batches - 1)
    assert history() is None
    for how in ({"history": "1"}, {"format": "json"}, {"format": "file"}):
        assert history(**how) == whole
    _, text = answer(library, address)
    assert "history=1#history" in text and "chart attempts" not in text


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
    status, text = answer(library, "/")
    assert status == 503 and "the ledger is torn" in text

"""routes: the function that reads the page of each route, and a page of an address as a file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from configs.store import default_store
from flows.queries.request import NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.reporting.output_files import write_whole
from flows.viewer import addresses
from flows.viewer.addresses import Page, Route
from flows.viewer.pages.batch import batch_page
from flows.viewer.pages.compare import compare_page
from flows.viewer.pages.rewards import rewards_page
from flows.viewer.pages.runs import run_page, runs_page
from flows.viewer.pages.search import changes_page, search_page
from flows.viewer.pages.step import evaluation_page, step_page
from flows.viewer.pages.trace import any_trace_page, trace_page
from flows.viewer.rendering import as_file

PAGES: dict[str, tuple[Route, Callable[[StoreReader, PageRequest], Page]]] = {
    "runs": (addresses.runs, runs_page),
    "run": (addresses.run, run_page),
    "step": (addresses.step, step_page),
    "evaluation": (addresses.evaluation, evaluation_page),
    "batch": (addresses.batch, batch_page),
    "search": (addresses.search, search_page),
    "changes": (addresses.changes, changes_page),
    "rewards": (addresses.rewards, rewards_page),
    "trace": (addresses.trace, trace_page),
    "any_trace": (addresses.any_trace, any_trace_page),
    "compare": (addresses.compare, compare_page),
}
"""All pages; their functions raise NotThere and BadQuestion."""


def page_at(path: str, query: Mapping[str, str]) -> tuple[str, PageRequest]:
    """Return the page of a path as it was written, and the request. Raises NotThere."""
    for name, (route, _) in PAGES.items():
        if (parts := route.read(path)) is not None:
            return name, PageRequest(path, parts, query)
    patterns = ", ".join(route.pattern for route, _ in PAGES.values())
    raise NotThere(f"there is no page at {path!r}; pages are at {patterns}")


def read_page(name: str, reader: StoreReader, request: PageRequest) -> Page:
    """Return a page. Raises NotThere and BadQuestion."""
    return PAGES[name][1](reader, request)


def parsed_address(address: str) -> tuple[str, PageRequest]:
    """Return the page of an address, which may have a host before it, and the request. Raises NotThere."""
    parts = urlsplit(address)
    # A saved page has its form already, and a token stays with its owner: neither belongs into the request.
    return page_at(parts.path, {key: value for key, value in parse_qsl(parts.query) if key not in ("format", "token")})


def save(address: str, file: str, store: str = "", force: bool = False) -> int:
    """Write the page of an address to a file and say so; return the exit status.

    Raises NotThere, OutputRefused where the file may not be written, LayoutError where there is no store.
    """
    print(save_page(StoreReader.at(store or default_store()), address, Path(file), force))
    return 0


def save_page(reader: StoreReader, address: str, file: Path, force: bool = False) -> str:
    """Write the page of an address to a file; return a sentence that says so. Raises what `write_whole` does."""
    name, request = parsed_address(address)
    if request.path.get("run") == "latest":
        address = address.replace("/runs/latest", f"/runs/{quote(reader.latest(), safe='')}", 1)
        name, request = parsed_address(address)
    data = as_file(read_page(name, reader.still(), request), request)
    write_whole(file, lambda draft: draft.write_bytes(data), force)
    return f"{address} is in {file}: one file of {len(data)} bytes, which loads nothing"

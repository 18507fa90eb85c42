"""The routes: each kind of page with its address and the function that reads it; a page of an address as a file."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from configs.store import default_store
from flows.queries.request import NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.reporting.output_files import write_whole
from flows.viewer.addresses import Page
from flows.viewer.pages.batch import batch_page, row_page
from flows.viewer.pages.compare import compare_choice_page, compare_example_page, compare_page, compare_step_page
from flows.viewer.pages.example import example_page
from flows.viewer.pages.runs import metric_page, run_page, runs_page
from flows.viewer.pages.search import changes_page, search_page
from flows.viewer.pages.step import evaluation_page, step_page
from flows.viewer.pages.trace import any_trace_page, trace_page
from flows.viewer.rendering import as_file


def _expression(pattern: str) -> str:
    names = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
    return re.sub(r"\{(\w+):path\}", r"(?P<\1>.+)", names) + ("" if ":path" in pattern else "/?")


class Route(NamedTuple):
    """A kind of page. `read` raises NotThere and BadQuestion."""

    pattern: str
    """Its path; a part in braces is a name or a number, `:path` one that may hold slashes."""
    read: Callable[[StoreReader, PageRequest], Page]


PAGES = {
    "runs": Route("/", runs_page),
    "run": Route("/runs/{run}", run_page),
    "metric": Route("/runs/{run}/metrics/{metric:path}", metric_page),
    "step": Route("/runs/{run}/steps/{step}", step_page),
    "evaluation": Route("/runs/{run}/evaluations/{step}", evaluation_page),
    "batch": Route("/runs/{run}/steps/{step}/batch", batch_page),
    "row": Route("/runs/{run}/steps/{step}/batch/{row}", row_page),
    "search": Route("/runs/{run}/search", search_page),
    "changes": Route("/runs/{run}/changes", changes_page),
    "example": Route("/runs/{run}/example", example_page),
    "trace": Route("/runs/{run}/traces/{trace:path}", trace_page),
    "any_trace": Route("/traces/{trace:path}", any_trace_page),
    "compare_choice": Route("/compare", compare_choice_page),
    "compare": Route("/compare/{a}/{b}", compare_page),
    "compare_step": Route("/compare/{a}/{b}/steps/{step}", compare_step_page),
    "compare_example": Route("/compare/{a}/{b}/example", compare_example_page),
}
"""All pages; `addresses` writes what these patterns read."""
_PATHS = {name: re.compile(_expression(route.pattern)) for name, route in PAGES.items()}


def page_at(path: str, query: Mapping[str, str]) -> tuple[str, PageRequest]:
    """Return the page of a path as it was written, and the request. Raises NotThere."""
    for name, expression in _PATHS.items():
        if match := expression.fullmatch(path):
            return name, PageRequest(path, {key: unquote(value) for key, value in match.groupdict().items()}, query)
    patterns = ", ".join(route.pattern for route in PAGES.values())
    raise NotThere(f"there is no page at {path!r}; pages are at {patterns}")


def parsed_address(address: str) -> tuple[str, PageRequest]:
    """Return the page of an address, which may have a host before it, and the request. Raises NotThere."""
    parts = urlsplit(address)
    # Who saves a page says its form, and a token is nobody else's: neither belongs into the request.
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
        newest = quote(reader.latest(), safe="")
        return save_page(reader, address.replace("/runs/latest", f"/runs/{newest}", 1), file, force)
    data = as_file(PAGES[name].read(reader.still(), request), request)
    write_whole(file, lambda draft: draft.write_bytes(data), force)
    return f"{address} is in {file}: one file of {len(data)} bytes, which loads nothing"

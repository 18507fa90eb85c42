"""What each page says, as plain values; its template only lays them out."""

from collections.abc import Callable, Mapping

from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer.addresses import Page
from flows.viewer.pages.batch import batch_page, row_page
from flows.viewer.pages.compare import compare_choice_page, compare_page, compare_step_page
from flows.viewer.pages.example import compare_example_page, example_page
from flows.viewer.pages.run import metric_page, run_page
from flows.viewer.pages.runs import runs_page
from flows.viewer.pages.step import evaluation_page, step_page
from flows.viewer.pages.trace import any_trace_page, trace_page

PAGES: Mapping[str, Callable[[StoreReader, PageRequest], Page]] = {
    "runs": runs_page,
    "run": run_page,
    "metric": metric_page,
    "step": step_page,
    "evaluation": evaluation_page,
    "batch": batch_page,
    "row": row_page,
    "example": example_page,
    "trace": trace_page,
    "any_trace": any_trace_page,
    "compare_choice": compare_choice_page,
    "compare": compare_page,
    "compare_step": compare_step_page,
    "compare_example": compare_example_page,
}
"""What reads a page, by the names of `addresses.PATTERNS`. Each raises NotThere and BadQuestion."""

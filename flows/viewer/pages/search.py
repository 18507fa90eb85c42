"""Search over all rollouts of a run, and what changed between two of its policies."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries.conditions import EXAMPLE, BadCondition, search_condition
from flows.queries.notes import search_notes
from flows.queries.policy_changes import policy_changes, policy_versions
from flows.queries.request import NotThere, PageRequest
from flows.queries.rollout_search import Hits, commands, describe_hits, search_run
from flows.queries.store_reader import StoreReader, expired_rows_of_runs, has_lost_rows
from flows.queries.views import ROLLOUT_COLUMNS
from flows.reporting.svg import colour
from flows.viewer import addresses
from flows.viewer.addresses import Crumb, Page

PAGE_SIZE = 50


def search_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the rollouts of a run that are searched. Raises NotThere for an unknown run, BadQuestion for a wrong page.

    Asks: `q`, a text, /regular expression/ or condition; `step` or `evaluation`, to list the hits of one; `page`.
    """
    run, text = asked.path["run"], asked.text("q").strip()
    values: dict[str, Any] = {"run": run, "q": text, "problem": None, "condition": None, "example": EXAMPLE}
    values |= {"columns": list(ROLLOUT_COLUMNS), "retired": expired_rows_of_runs(library, run)}
    if text and asked.from_other_site:
        values["problem"] = "Another site opened this address, so the search was not run. Press Search to run it."
    elif text:
        try:
            condition = search_condition(text)
            hits = search_run(library, run, condition, asked.reader_gone)
        except BadCondition as error:  # beside the field, where it can be put right
            values["problem"] = str(error)
        else:
            rows, place = _of_step(hits.rows, asked), asked.number("page", 1, least=1)
            shown = rows.slice((place - 1) * PAGE_SIZE, PAGE_SIZE)
            listed = [{**hit, "address": _address(run, hit)} for hit in describe_hits(library, run, shown, condition)]
            values |= {
                **_counts(hits, asked),
                "notes": search_notes(library.store, run, text),
                "condition": condition.text,
                "commands": commands(run, condition, library.store.root.address),
                "hits": listed,
                "num_listed": rows.height,
                "page_number": place,
                "num_pages": max(-(-rows.height // PAGE_SIZE), 1),
            }
    return Page("search.html", "Search", values, (Crumb(run, addresses.run(run)),))


def _of_step(rows: pl.DataFrame, asked: PageRequest) -> pl.DataFrame:
    """Return the hits that are to be listed: those of a step or an evaluation, where one is named."""
    for name, for_training in (("step", True), ("evaluation", False)):
        if asked.text(name):
            return rows.filter(step=asked.number(name, 0), for_training=for_training)
    return rows


def _address(run: str, hit: Mapping[str, Any]) -> str:
    return addresses.trace(run, hit["trace_id"], hit["key"])


def _counts(hits: Hits, asked: PageRequest) -> dict[str, Any]:
    """Return how many rollouts of each step are hits: as numbers, and as a chart whose bars lead to them."""
    counts = hits.counts.to_dicts()
    steps = [
        {"step": each["step"], "address": asked.but(step=each["step"], evaluation=None, page=None)}
        for each in counts
        if each["for_training"]
    ]
    found = [each["num_hits"] for each in counts if each["for_training"]]
    series = {"name": "hits", "values": found, "kind": "bars", "colour": colour(0)}
    return {
        "counts": counts,
        "steps": steps,
        "first_step": hits.first_step,
        "num_hits": sum(each["num_hits"] for each in counts),
        "num_rollouts": sum(each["num_rollouts"] for each in counts),
        "drawn": {"title": "Hits by step", "unit": "rollouts", "zero": True, "wide": True, "series": [series]},
    }


def changes_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return what changed between two policies of a run. Asks: `a` and `b`, versions. Raises NotThere, BadQuestion."""
    run = asked.path["run"]
    versions = policy_versions(library, run)
    if not versions:
        gone = has_lost_rows(library, [lineage.traces for lineage in library.history(run).lineages], "traces")
        why = "any more: they were dropped for their age (`stagecoach maintain --retain`)" if gone else "yet"
        raise NotThere(f"run {run!r} has no rollouts of a policy {why}")
    a, b = asked.number("a", versions[0]), asked.number("b", versions[-1])
    found = policy_changes(library, run, a, b)
    linked = {
        part: [{**each, "address": addresses.search(run, each["condition"])} for each in found[part]]
        for part in ("measures", "gained", "lost")
    }
    values = {"run": run, "a": a, "b": b, "versions": versions, "counts": found["counts"], **linked}
    return Page("changes.html", f"Policy {a} to {b}", values, (Crumb(run, addresses.run(run)),))

"""Search over all rollouts of a run, and what changed between two of its policies."""

from typing import Any

from flows.queries.conditions import EXAMPLE, BadCondition, search_condition
from flows.queries.request import NotThere, PageRequest
from flows.queries.rollout_search import Hits, commands, describe_hits, policy_changes, policy_versions, search_run
from flows.queries.store_reader import StoreReader, expired_rows_of_runs, has_lost_rows
from flows.queries.views import ROLLOUT_COLUMNS
from flows.reporting.svg import colour
from flows.viewer import addresses
from flows.viewer.addresses import Page

PAGE_SIZE = 50


def search_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the rollouts of a run that are searched. Raises NotThere for an unknown run, BadQuestion for a wrong page.

    The request has `q`, a text, /regular expression/ or condition; `step` or `evaluation`, to list the hits of one;
    `page`.
    """
    run, text = request.path["run"], request.text("q").strip()
    values: dict[str, Any] = {"run": run, "q": text, "problem": None, "condition": None, "example": EXAMPLE}
    values |= {"columns": list(ROLLOUT_COLUMNS), "retired": expired_rows_of_runs(reader, run)}
    if text and request.from_other_site:
        values["problem"] = "Another site opened this address, so the search was not run. Press Search to run it."
    elif text:
        try:
            condition = search_condition(text)
            hits = search_run(reader, run, condition, request.reader_gone)
        except BadCondition as error:  # beside the field, where it can be put right
            values["problem"] = str(error)
        else:
            rows, page = hits.rows, request.number("page", 1, least=1)
            for name, for_training in (("evaluation", False), ("step", True)):
                if request.text(name):
                    rows = hits.rows.filter(step=request.number(name, 0), for_training=for_training)
            listed = describe_hits(reader, run, rows.slice((page - 1) * PAGE_SIZE, PAGE_SIZE), condition)
            values |= {
                **_counts(hits, request),
                "condition": condition.text,
                "commands": commands(run, condition, reader.store.root.address),
                "hits": [{**hit, "address": addresses.trace(run, hit["trace_id"], hit["key"])} for hit in listed],
                "num_listed": rows.height,
                "page_number": page,
                "num_pages": max(-(-rows.height // PAGE_SIZE), 1),
            }
    return Page("search.html", "Search", values, ((run, addresses.run(run)),))


def _counts(hits: Hits, request: PageRequest) -> dict[str, Any]:
    """Return how many rollouts of each step are hits: as numbers, and as a chart whose bars lead to them."""
    counts = hits.counts.to_dicts()
    every = request.but(step=None, evaluation=None, page=None)
    trained = {row["step"]: row["num_hits"] for row in counts if row["for_training"]}
    series = {"name": "hits", "values": [*trained.values()], "kind": "bars", "colour": colour(0)}
    return {
        "counts": counts,
        "steps": [{"step": n, "address": f"{every}&step={n}"} for n in trained],
        "first_step": hits.first_step,
        "num_hits": sum(row["num_hits"] for row in counts),
        "num_rollouts": sum(row["num_rollouts"] for row in counts),
        "drawn": {"title": "Hits by step", "unit": "rollouts", "zero": True, "wide": True, "series": [series]},
    }


def changes_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return what changed between two policies of a run, the versions `a` and `b`. Raises NotThere, BadQuestion."""
    run = request.path["run"]
    versions = policy_versions(reader, run)
    if not versions:
        gone = has_lost_rows(reader, [lineage.traces for lineage in reader.history(run).lineages], "traces")
        why = "any more: they were dropped for their age (`stagecoach maintain --retain`)" if gone else "yet"
        raise NotThere(f"run {run!r} has no rollouts of a policy {why}")
    a, b = request.number("a", versions[0]), request.number("b", versions[-1])
    changes = policy_changes(reader, run, a, b)
    linked = {
        part: [{**row, "address": addresses.search(run, row["condition"])} for row in changes[part]]
        for part in ("gained", "lost")
    }
    values = {"run": run, "a": a, "b": b, "versions": versions, "counts": changes["counts"], **linked}
    return Page("changes.html", f"Policy {a} to {b}", values, ((run, addresses.run(run)),))

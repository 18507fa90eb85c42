"""Two runs side by side: what they are, where they part, their results; and the same step of both."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.compare import (
    FIGURES,
    compare_cached,
    compared_evaluations,
    compared_keys,
    figures_of,
    step_pair,
    steps_of_both,
    works_of,
)
from flows.queries.compare_rows import differences_between
from flows.queries.compare_summary import ledger_cells, replayed_settings, step_of, summary_sentences
from flows.queries.compare_traces import BOTH, compared_groups, compared_samples, compared_traces
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.reporting.svg import sequential
from flows.viewer import addresses
from flows.viewer.addresses import Crumb, Page
from tasks.metrics.figures import MEANINGS

LONG_CONFIG = 8
"""Settings that differ beyond which they are folded."""


def compare_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the comparison of two runs; `figure` is the further figure that each step shows."""
    a, b = asked.path["a"], asked.path["b"]
    figure = asked.one_of("figure", FIGURES, "num_kept")
    found = compare_cached(library, a, b)
    values = {
        **found,
        "retired": expired_rows_of_runs(library, a, b),
        "a": a,
        "b": b,
        "summary": summary_sentences(found),
        "parts_at": found["parting"] and found["parting"]["step"],
        "replays": replayed_settings(library, a, b, found["config"]),
        "config": sorted(found["config"], key=lambda each: not each["in_keys"]),
        "long_config": len(found["config"]) > LONG_CONFIG,
        "picture": ledger_cells(found["pieces"]),
        "figure": figure,
        "figures": list(FIGURES),
        "meanings": MEANINGS,
        "totals": figures_of(found["together"]),
        "paired": compared_evaluations(library, a, b).to_dicts(),
    }
    return Page("compare.html", f"{a} and {b}", values, (Crumb(a, addresses.run(a)),), any_going(library, a, b))


def compare_choice_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the comparison of run `a` with run `b`. Raises BadQuestion where one of them is not named."""
    a, b = asked.text("a"), asked.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    return compare_page(library, PageRequest(addresses.compare(a, b), {"a": a, "b": b}))


VIEWS = {
    "groups": "Groups",
    "verdicts": "Verdicts that differ",
    "samples": "Advantages that differ",
    "lone": "In one only",
}
PAGE_SIZES = {"groups": 20}
PAGE_SIZE = 50
SORTS = {
    "groups": (
        *("group", "reward_a", "reward_b", "difference", "kept_a", "kept_b"),
        *("num_shared", "max_advantage_difference"),
    ),
    "verdicts": ("trace_id", "outcome_a", "outcome_b", "reward_a", "reward_b"),
    "samples": ("size", "sample_id", "a", "b", "difference"),
    "lone": ("side", "group", "reward", "num_output_tokens"),
}
"""What each table can be sorted by; the first is how it comes."""


def compare_step_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return a step of two runs; `view` chooses the table, `sort`, `down` and `page` what of it is shown."""
    a, b, step = asked.path["a"], asked.path["b"], asked.required_number("step")
    view = asked.one_of("view", list(VIEWS), "groups")
    sort = asked.one_of("sort", SORTS[view], SORTS[view][0])
    made = step_pair(library, a, b, step)
    traces = compared_traces(library, a, b, step)
    tables = {each: _table(library, asked, each, traces, step) for each in VIEWS}
    # Sorted by size, the largest come first by default: they are what one looks for.
    down = asked.flag("down") if asked.text("sort") or asked.text("down") else sort == "size"
    known, steps = steps_of_both(library, a, b), {"a": made[0].figures(), "b": made[1].figures()}
    place = known.index(step)
    works = [works_of(library, run) for run in (a, b)]
    pieces = compared_keys(*({step: work.get(step, {})} for work in works))
    values = {
        "retired": expired_rows_of_runs(library, a, b),
        **{"a": a, "b": b, "step": step, "view": view, "sort": sort, "down": down},
        "in_run": {side: bool(work.get(step)) and bool(steps[side]) for side, work in zip("ab", works, strict=True)},
        "work": step_of(pieces, step),
        "previous": known[place - 1] if place else None,
        "next": known[place + 1] if place + 1 < len(known) else None,
        "figures": figures_of(steps),
        "meanings": MEANINGS,
        "between": differences_between(*made),
        "agents": traces["agent"].n_unique(),
        "rollouts": {side: int((traces["side"] == side).sum()) for side in (BOTH, "a", "b")},
        "views": [{"name": each, "title": title, "num": tables[each].height} for each, title in VIEWS.items()],
        **_page_rows(
            asked, view, tables[view].sort(sort, descending=down, nulls_last=True, maintain_order=True), traces
        ),
    }
    crumbs = (Crumb(a, addresses.run(a)), Crumb(f"{a} and {b}", addresses.compare(a, b)))
    return Page("compare_step.html", f"step {step}", values, crumbs, any_going(library, a, b))


def _table(library: StoreReader, asked: PageRequest, view: str, traces: pl.DataFrame, step: int) -> pl.DataFrame:
    """Return all rows of one of the tables."""
    runs = asked.path["a"], asked.path["b"]
    if view == "groups":
        return compared_groups(library, *runs, step)
    if view == "verdicts":
        return traces.filter(pl.col("outcome_a") != pl.col("outcome_b"))
    if view == "samples":
        moved = compared_samples(library, *runs, step).filter(pl.col("difference") != 0)
        about = traces.select("trace_id", "environment", "example_id", "key_a", "key_b")
        return moved.join(about, on="trace_id", how="left").with_columns(size=pl.col("difference").abs())
    lone = traces.filter(pl.col("side") != BOTH)
    either = {name: pl.coalesce(f"{name}_a", f"{name}_b") for name in ("key", "reward", "outcome", "num_output_tokens")}
    return lone.select("trace_id", "side", "environment", "example_id", "agent", "group", **either)


def _page_rows(asked: PageRequest, view: str, rows: pl.DataFrame, traces: pl.DataFrame) -> dict[str, Any]:
    """Return the rows of one page, and how many pages there are."""
    size = PAGE_SIZES.get(view, PAGE_SIZE)
    num_pages = max(1, -(-rows.height // size))
    number = asked.number("page", 1, least=1)
    shown = rows.slice((number - 1) * size, size).to_dicts()
    if view == "groups":
        shown = _with_rewards(shown, traces)
    return {"rows": shown, "number": number, "num_pages": num_pages, "num_rows": rows.height}


def _with_rewards(groups: Sequence[Mapping[str, Any]], traces: pl.DataFrame) -> list[dict[str, Any]]:
    """Return groups with the reward of each of their rollouts, and its place in the range of the step's rewards."""
    rewards = pl.concat([traces["reward_a"], traces["reward_b"]]).drop_nulls().drop_nans().to_list()
    lowest, highest = min(rewards, default=None), max(rewards, default=None)
    wanted = traces.filter(pl.col("group").is_in([each["group"] for each in groups]))
    parts = wanted.partition_by("group", as_dict=True)

    def of_side(group: int, side: str) -> list[dict[str, Any]]:
        rows = parts[group,].filter(pl.col("side").is_in([BOTH, side])).iter_rows(named=True)
        return [
            {
                **{"trace_id": row["trace_id"], "key": row[f"key_{side}"], "shared": row["side"] == BOTH},
                **{"agent": row["agent"], "reward": row[f"reward_{side}"]},
                "level": sequential(row[f"reward_{side}"], lowest, highest),
            }
            for row in rows
        ]

    return [{**each, **{f"rewards_{side}": of_side(each["group"], side) for side in "ab"}} for each in groups]

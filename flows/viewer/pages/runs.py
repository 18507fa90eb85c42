"""All runs of a store; one run: its curves, its metrics, its ledger, live while it goes on."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any

import polars as pl

from flows.queries.charts import last_value
from flows.queries.metrics import StepNumbers, matching, metrics, numbers
from flows.queries.request import PageRequest
from flows.queries.reward_figures import kept_figures
from flows.queries.run_state import GONE, look_of, recorded_warnings
from flows.queries.runs import events, overview, runs, tokens_of, waiting_gate
from flows.queries.scores import held_out
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.drawings import cell_class
from flows.viewer.pages.curves import curves, step_place
from storage.read.views import select
from tasks.stages import EVALUATION, STEP_STAGES

Row = dict[str, Any]
MAX_CELLS = 200
"""Steps of a ledger from which on neighbours in a row that look alike are one cell."""
SORTS = {name: name for name in ("run", "state", "held_out", "seconds")}
SORTS |= {"steps": "steps_done", "reward": "last_reward", "tokens": "tokens_sampled", "changed": "changed_at"}
"""By what the list can be sorted; without, the newest change comes first."""
SEARCHED = ("run", "parent", "kind", "state", "message", "model")
SEARCHED_LISTS = ("algorithms", "environments", "tags", "notes")


def runs_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the list of runs. Asks: `q` (words that must all be there), `sort`, `down`, `state`."""
    every = runs(reader)
    states = every["state"].unique().sort().to_list()
    state, sort = request.one_of("state", states), request.one_of("sort", tuple(SORTS))
    words, down = request.text("q").lower().split(), request.flag("down")
    lists = [pl.col(name).list.join(" ") for name in SEARCHED_LISTS]
    texts = pl.concat_str(*SEARCHED, *lists, separator=" ", ignore_nulls=True)
    wanted = [texts.str.to_lowercase().str.contains(word, literal=True) for word in words]
    shown = every.filter(*wanted, (pl.col("state") == state) | (state == ""))
    shown = shown.sort(SORTS.get(sort, "changed_at"), descending=down or not sort, nulls_last=True, maintain_order=True)
    values = {
        "store": reader.store.root.address,
        "num_runs": every.height,
        "states": states,
        "chosen": {"q": request.text("q"), "state": state, "sort": sort, "down": down},
        "runs": shown.to_dicts(),
        **_news(reader, every.sort("changed_at", descending=True).to_dicts()),
    }
    return Page("runs.html", "Runs", values, live=True, quiet="going" not in every["look"])


RECENT, MAX_RECENT, MAX_EVENTS = timedelta(days=7), 20, 40
"""The start page tells of the runs that changed so long before the newest change, of so many, and so many events."""


def _news(reader: StoreReader, rows: Sequence[Row]) -> Row:
    """Return what `happened` to the runs that changed last, the newest first, and which of it `needs` a person."""
    happened, needs = [], []
    for row in rows[:MAX_RECENT]:
        run = row["run"]
        if rows[0]["changed_at"] - row["changed_at"] > RECENT:
            break
        happened += [{"run": run, **event, "look": look_of(event["event"])} for event in events(reader, run)]
        found = []
        if row["look"] == "bad" or row["state"] == GONE:
            found.append((row["state"], row["message"]))
        if row["look"] == "going" and (step := waiting_gate(reader, run)) is not None:
            found.append((f"step {step} waits for approval", f"stagecoach gate {run} --approve (or --refuse)"))
        warned = recorded_warnings(reader.store.runs, run)
        found += [(f"{hit['rule']} at step {hit['step']}", hit["text"]) for hit in warned]
        look = "bad" if row["look"] == "bad" else "warn"
        needs += [{"run": run, "look": look, "what": what, "text": text} for what, text in found]
    return {"happened": sorted(happened, key=itemgetter("at"), reverse=True)[:MAX_EVENTS], "needs": needs}


MOST_NUMBERS = 20
"""Steps in the table of numbers, the last ones, until all are requested: cells are most of what a long page weighs."""
MOST_DRAWN = 24
"""Metrics that a search finds and that have charts; of more there are small lines."""
FROM_ZERO = ("share", "tokens", "tokens/s", "rollouts", "s", "turns", "steps", "nats")
"""Units whose scale begins at zero: twice as high is twice as much."""


def run_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the page of a run. Raises NotThere for an unknown run.

    Asks: `numbers=all`; `metric`, words that metrics must have; what `curves` asks.
    """
    run = request.path["run"]
    measured = numbers(reader, run)
    summary = overview(reader, run, [each.work for each in measured])
    evaluations = held_out(reader, run)
    values = {
        **summary,
        "retired": expired_rows_of_runs(reader, run),
        "steps": [step_place(run, each) for each in measured],
        **curves(reader, run, (measured, evaluations), request),
        "metrics": _metrics(run, measured, request.text("metric")),
        "evaluations": [{**each, "address": addresses.evaluation(run, each["version"])} for each in evaluations],
        "warnings": [{**hit, "address": _shown_by(run, hit)} for hit in recorded_warnings(reader.store.runs, run)],
        "events": [{**event, "look": look_of(event["event"])} for event in events(reader, run)],
        "ledger": _ledger(reader, run),
        "rewards_tried": bool(kept_figures(reader.store.root, run)),
        "totals": _totals(measured),
        "numbers_from": 0 if request.one_of("numbers", ("all",)) else max(0, len(measured) - MOST_NUMBERS),
    }
    return Page("run.html", run, values, (("Runs", addresses.runs()),), live=summary["going"])


def _shown_by(run: str, hit: Row) -> str:
    """Return the address of the rollouts that show a warning: those of a condition, or all of its step."""
    step = hit["step"]
    return addresses.search(run, hit["where"]) + f"&step={step}" if hit["where"] else addresses.step(run, step)


def _metrics(run: str, measured: Sequence[StepNumbers], words: str) -> Row:
    """Return every metric in groups, or those that have some words, which are drawn if they are few."""
    every = metrics(measured)
    found = matching(every, words)
    groups: dict[str, list[Row]] = {}
    for metric in found:
        last = last_value(metric["series"][0]["values"])
        row = {**metric, "title": metric["name"], "zero": metric["unit"] in FROM_ZERO, "last": last}
        groups.setdefault(metric["group"], []).append({**row, "address": addresses.metric(run, metric["name"])})
    return {
        **{"searched": words, "num_all": len(every), "num": len(found)},
        "drawn": bool(words) and len(found) <= MOST_DRAWN,
        "groups": [{"title": title, "metrics": rows} for title, rows in groups.items()],
    }


_LEDGER = """
select stage, computed_by, finished, min(step) as step, count(*) as span, arg_min(key, step) as key
from (
    select *, step - row_number() over (partition by stage, computed_by, finished order by step) as neighbours,
        max(step) over () - min(step) over () > $most as is_long
    from (
        select stage, step, any_value(key order by started_at) as key, bool_and(finished) as finished,
            last(computed_by order by started_at) as computed_by
        from stage_times where list_contains($stages, stage) group by stage, step
    )
)
group by stage, computed_by, finished, if(is_long, neighbours, step)
order by list_position($stages, stage), step
"""


def _ledger(reader: StoreReader, run: str) -> Row:
    """Return the work that a run uses as a picture: a cell for each stage of a step."""
    order = (*STEP_STAGES, EVALUATION)
    relations = reader.frames(run).relations
    rows = select(relations, _LEDGER, stages=list(order), most=MAX_CELLS).to_dicts()
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    first = min((row["step"] for row in rows), default=0)
    counts = Counter({run: 0})
    for row in rows:
        counts[row["computed_by"]] += row["span"]
    names = sorted(counts, key=lambda name: (name != run, -counts[name]))
    cells = []
    for row in rows:
        step, by, end = row["step"], names.index(row["computed_by"]), row["step"] + row["span"] - 1
        look = f"{cell_class(by)}{' shared' if by else ''}{'' if row['finished'] else ' unfinished'}"
        where = addresses.evaluation if row["stage"] == EVALUATION else addresses.step
        steps = f"step {step}" + (f" to {end}" if end > step else "")
        cells.append(
            {
                **{"row": stages.index(row["stage"]), "column": step - first, "span": row["span"], "class": look},
                "title": f"{steps}, {row['stage']}: computed by {row['computed_by']}, key {row['key'][:8]}",
                "address": where(run, step),
            }
        )
    legend = [
        {"run": name, "class": cell_class(by), "num_pieces": counts[name], "address": addresses.run(name)}
        for by, name in enumerate(names)
    ]
    last = max((row["step"] + row["span"] for row in rows), default=0)
    return {"stages": stages, "steps": [*range(first, last)], "cells": cells, "legend": legend}


def _totals(measured: Sequence[StepNumbers]) -> dict[str, float | None]:
    """Return sums over all steps, and the last reward and loss; rollouts without those that were stopped."""
    counts = [count for each in measured if (count := each.value("rollouts", "all")) is not None]
    return {
        # Steps of which none has counted yet are unknown; no step at all is really none.
        "rollouts": sum(counts) if counts or not measured else None,
        **tokens_of([each.values if each.work.finished else {} for each in measured]),
        "reward": _last(measured, "reward/mean", "all"),
        "loss": _last(measured, "updates/loss/mean", ""),
    }


def _last(measured: Sequence[StepNumbers], measure: str, scope: str) -> float | None:
    return last_value([each.value(measure, scope) for each in measured])

"""All runs of a store: where each stands, forks under what they branched off."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.queries.request import PageRequest
from flows.queries.runs import runs
from flows.queries.store_reader import StoreReader
from flows.viewer.addresses import Page

Row = dict[str, Any]
SORTS: Mapping[str, Callable[[Row], Any]] = {
    "run": lambda row: row["run"],
    "state": lambda row: row["state"],
    "steps": lambda row: row["steps_done"],
    "reward": lambda row: row["last_reward"],
    "held_out": lambda row: row["held_out"],
    "tokens": lambda row: row["tokens_sampled"],
    "seconds": lambda row: row["seconds"],
    "changed": lambda row: row["changed_at"],
}
"""By what the list can be sorted; without, the newest come first and forks stand under their parents."""
SEARCHED = ("run", "parent", "kind", "state", "message", "model")


def runs_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the list of runs. Asks: `q` (words that must all be there), `sort`, `down`, `state`."""
    every = runs(library).to_dicts()
    states = sorted({row["state"] for row in every})
    state = asked.one_of("state", states)
    sort = asked.one_of("sort", tuple(SORTS))
    words = asked.text("q").casefold().split()
    wanted = [row for row in every if _matches(row, words) and state in ("", row["state"])]
    shown = _sorted(wanted, sort, asked.flag("down")) if sort else tree(wanted)
    values = {
        "store": library.store.root.address,
        "num_runs": len(every),
        "states": states,
        "chosen": {"q": asked.text("q"), "state": state, "sort": sort, "down": asked.flag("down")},
        "is_tree": not sort,
        "runs": shown,
    }
    return Page("runs.html", "Runs", values, live=True, quiet=all(row["look"] != "going" for row in every))


def tree(rows: Sequence[Row]) -> list[Row]:
    """Return runs with each one's forks below it, `depth` how deep; what has the newest change comes first."""
    names = {row["run"] for row in rows}
    below: dict[str | None, list[Row]] = {}
    for row in rows:
        below.setdefault(row["parent"] if row["parent"] in names else None, []).append(row)
    placed: set[str] = set()
    # All once more at the end: two runs that each took rollouts of the other hang below nothing.
    roots = (*below.get(None, ()), *rows)
    families = [_family(row, below, placed) for row in roots if row["run"] not in placed]
    families.sort(key=lambda own: max(_changed(row) for row in own), reverse=True)
    return [row for own in families for row in own]


def _family(root: Row, below: Mapping[str | None, Sequence[Row]], placed: set[str]) -> list[Row]:
    """Return a run with all forks below it, the newest first; adds their names to `placed`."""
    found, waiting = [], [(root, 0)]
    while waiting:
        row, depth = waiting.pop()
        if row["run"] not in placed:
            placed.add(row["run"])
            found.append({**row, "depth": depth})
            waiting += [(fork, depth + 1) for fork in sorted(below.get(row["run"], ()), key=_changed)]
    return found


def _changed(row: Row) -> Any:
    return row["changed_at"]


def _matches(row: Row, words: Sequence[str]) -> bool:
    texts = [row[name] or "" for name in SEARCHED] + row["algorithms"] + row["environments"]
    text = " ".join(texts).casefold()
    return all(word in text for word in words)


def _sorted(rows: Sequence[Row], sort: str, down: bool) -> list[Row]:
    """Return rows by a column; those without a value stand last, whichever way."""
    value = SORTS[sort]
    known = sorted((row for row in rows if value(row) is not None), key=value, reverse=down)
    return [{**row, "depth": 0} for row in (*known, *(row for row in rows if value(row) is None))]

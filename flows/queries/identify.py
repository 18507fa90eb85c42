"""Identifying: what an id that somebody typed names, in a store whose ids need not be unique over runs.

Written as                     names
  RUN or RUN:VERSION           a policy, the last one or that of a version
  RUN:STEP:ROW or KEY/ROW      a row of the batch that the run trained at a step, or of a packing
  TRACE, TRACE/BRANCH          a rollout, a training sample of it
  ENVIRONMENT/EXAMPLE          an example
  GROUP/MEMBER                 an assignment
  KEY                          a policy or any other finished work, by its key in the ledger
Keys and traces may be cut to their first eight characters or more.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

import polars as pl

from flows.queries.row_lineage import KINDS, RowNode, RowTree, find_rows, together
from flows.queries.step_history import StepHistory
from storage.read.frames import Frames
from storage.read.lineage import Work

SHORTEST_PREFIX = 8
NEAREST = 5
WORK = "work"
NAMED = (*(kind for kind in KINDS if kind not in ("verdict", "update")), WORK)
"""What an id may be said to be."""


class UnknownId(ValueError):
    """An id names nothing in the store, or several different things."""


def identify(frames: Frames, text: str, kind: str = "") -> RowTree:
    """Return the rows that an id names: of one kind and one id, once for each work that made it.

    `kind` chooses where an id can be read in several ways. Raises UnknownId, with the nearest ids.
    """
    if kind and kind not in NAMED:
        raise UnknownId(f"{kind!r} is no kind of thing that an id can name; there are {', '.join(NAMED)}")
    found = {each: tree for each in ([kind] if kind else NAMED) if (tree := _find(frames, each, text)).roots}
    if not found:
        near = nearest(text, _pool(frames))
        where = f"run {frames.only!r} of store" if frames.only else "store"
        raise UnknownId(
            f"{where} {frames.store.root.address}: {text!r} names {f'no {kind}' if kind else 'nothing'}"
            f"{'; the nearest ids are ' + ', '.join(near) if near else ''}. The store was only read"
        )
    if len(found) > 1:
        raise UnknownId(f"{text!r} names {' and '.join(f'a {each}' for each in found)}: say which one with --kind")
    ((kind, tree),) = found.items()
    several = sorted({node.key if kind == WORK else node.id for node in tree.roots})
    if len(several) > 1:
        raise UnknownId(f"{text!r} is the beginning of several ids, {', '.join(several[:NEAREST])}: give more of it")
    return tree


def nearest(text: str, pool: Iterable[str]) -> list[str]:
    """Return the ids that are most like `text`: those that begin like it, and names that differ by a letter or two."""
    known = list(dict.fromkeys(pool))
    begins = [(_common(text, each), each) for each in known]
    alike = [each for length, each in sorted(begins, key=lambda pair: (-pair[0], pair[1])) if length >= 3]
    close = difflib.get_close_matches(text, alike[:200] or known[:2000], NEAREST, 0.6)
    return list(dict.fromkeys((*close, *alike)))[:NEAREST]


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _find(frames: Frames, kind: str, text: str) -> RowTree:
    if kind == WORK:
        works = [work for work in _by_key(frames, text) if "policies" not in work.tables]
        return RowTree([RowNode(WORK, work.stage, work.key) for work in works])
    if kind == "policy":
        return _of_keys(frames, kind, [work for work in _policies(frames, text) if work.finished])
    if kind == "row":
        return _rows(frames, text)
    return _by_id(frames, kind, text)


def _policies(frames: Frames, text: str) -> list[Work]:
    named = [work for work in frames.graph.makers("policies") if text in policy_names(work)]
    last = frames.graph.of_run(text).makers("policies")[-1:] if text in frames.run_names else []
    by_key = [work for work in _by_key(frames, text) if "policies" in work.tables]
    return list({work.key: work for work in (*named, *last, *by_key)}.values())


def policy_version(work: Work) -> int:
    """Return the version of the policy that a work made: training at step k makes k + 1, an import 0."""
    return work.step + 1 if "policy" in work.inputs else 0


def policy_names(work: Work) -> list[str]:
    """Return the names RUN:VERSION of the policy that a work made, one for each run that uses it."""
    return [f"{run}:{policy_version(work)}" for run in work.runs]


def _rows(frames: Frames, text: str) -> RowTree:
    head, _, row = text.rpartition(":" if ":" in text else "/")
    if not row.isdecimal():
        return RowTree([])
    run, _, step = head.rpartition(":")
    works = _batches(frames, run, int(step)) if run and step.isdecimal() else _by_key(frames, head)
    return find_rows(frames, "row", {"row": int(row)}, [work for work in works if "batches" in work.tables])


def _batches(frames: Frames, run: str, step: int) -> list[Work]:
    """Return the packing that a run trained last at a step, or the last one where it has trained none."""
    found = StepHistory(frames.graph, run).batch(step)
    return [found[0]] if found else []


def _by_key(frames: Frames, prefix: str) -> list[Work]:
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST_PREFIX},}}", prefix):
        return []
    return [work for key, work in frames.graph.works.items() if key.startswith(prefix)]


def _of_keys(frames: Frames, kind: str, works: Sequence[Work]) -> RowTree:
    return together(find_rows(frames, kind, {"key": work.key}, [work]) for work in works)


def _by_id(frames: Frames, kind: str, text: str) -> RowTree:
    described = KINDS[kind]
    name = pl.concat_str(described.row_id, separator="/")
    rows = frames[described.table].select(*described.row_id, "key")
    found = rows.filter(name == text).collect()
    if not len(found) and kind == "trace" and len(text) >= SHORTEST_PREFIX:
        found = rows.filter(name.str.starts_with(text)).collect()
    made: dict[tuple[str, ...], list[Work]] = {}
    for *row_id, key in found.unique().sort(*described.row_id).iter_rows():
        made.setdefault(tuple(row_id), []).append(frames.graph.works[key])
    several = list(made.items())[: NEAREST + 1]  # more than one is an error that names some
    return together(
        find_rows(frames, kind, dict(zip(described.row_id, row_id, strict=True)), works) for row_id, works in several
    )


def _pool(frames: Frames) -> Iterable[str]:
    yield from frames.run_names
    for work in frames.graph.makers("policies"):
        yield from policy_names(work)
    for kind in ("trace", "assignment", "example"):
        described = KINDS[kind]
        yield from (
            frames[described.table]
            .select(pl.concat_str(described.row_id, separator="/"))
            .unique()
            .collect()[described.row_id[0]]
        )
    yield from frames.graph.works

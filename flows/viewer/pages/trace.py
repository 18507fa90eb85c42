"""A trace: its outcome and why, its conversation, and its tokens with all that was measured of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.messages import (
    MOST_HITS,
    WINDOW,
    Line,
    hits,
    images,
    link_calls,
    long_text,
    message_works,
    messages,
    read_message,
    reading,
    rejected_messages,
)
from flows.queries.reader import read_json, reward_parts
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.rollout_list import TraceNeighbours, neighbours_of_trace
from flows.queries.rollouts import episode, history, mates
from flows.queries.row_lineage import nearest, policy_version
from flows.queries.run_state import any_going
from flows.queries.sentences import flat, sentence
from flows.queries.shown_tokens import NAMES, colourings, default_colouring, describe, scaled_weights, shown_tokens
from flows.queries.store_reader import StoreReader, expired_rows, has_lost_rows
from flows.queries.tokens import token_policies, tokenizer, tokens
from flows.queries.trace import (
    WEIGHTS,
    FoundTrace,
    find_trace,
    index,
    other_runs,
    outcome_of,
    packed_weights,
    samples,
    uses,
)
from flows.queries.views import EXPIRED
from flows.viewer import addresses
from flows.viewer.addresses import Crumb, Page
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED

VIEWS = ("both", "text", "tokens")
JUMPS = ("first", "last", "trained", "error")
SMALL_RUN = 32
"""Batches of rollouts whose traces are looked through for the history of an example without being asked to."""
JSONS = ("rewards", "metrics", "info", "record")
ERROR = ("error_class", "error_type", "error_message", "error_traceback")
TONES = {
    **{TRAINED: "good", PENDING: "going"},
    **dict.fromkeys((FILTERED, REFUSED, NO_WEIGHT, EXPIRED), "warn"),
    **dict.fromkeys((ERRORED, STOPPED, STALE, QUARANTINED), "bad"),
}
SPANS = ("setup", "generation", "scoring")
MOST_BRANCHES, MOST_ACROSS = 40, 90
"""Larger graphs are not drawn: the branches can be read one by one."""
ROLES = ("system", "user", "assistant", "tool")
Values = dict[str, Any]


def trace_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return a trace as a run uses it.

    The question may have: `key` (the work that made it), `branch`, `from` (the first message of the window), `to`
    (first, last, trained or error, instead), `message` (that one alone, `at` its first token), `view`, `color`, `q`,
    `list` (the choice of the list that it was opened from; see `flows.queries.rollout_list`) and `history` (1 for all
    attempts at its example where the run is large; what is saved or read by a program has them).
    """
    found = find_trace(library, asked.path["run"], asked.path["trace"], asked.text("key"))
    row = found.row
    beside = neighbours_of_trace(library, found, asked.text("list"))
    values = {
        "run": found.run,
        "trace_id": found.trace_id,
        "key": found.key,
        "step": found.step,
        "for_training": found.lineage.for_training,
        "retired": expired_rows(library, (*found.lineage.works, *message_works(library, found))),
        "trace": {name: value for name, value in row.items() if name not in (*JSONS, *ERROR)},
        "error": _error(row),
        "reward_parts": reward_parts(row["rewards"]),
        "metrics": read_json(row["metrics"]),
        **{name: _fold(row[name]) for name in ("info", "record")},
        "outcome": outcome(library, found),
        "samples": trained_in(library, found),
        "policies": policies(library, found),
        "timing": timing(row),
        "other_runs": other_runs(found),
        **_around(library, found, asked),
        **_neighbour_links(beside),
        **_Conversation(library, found, asked).values(),
    }
    # What is pending may be decided while somebody looks; nothing else of a trace ever changes.
    live = values["outcome"]["outcome"] == PENDING and any_going(library, found.run)
    return Page("trace.html", f"Trace {found.trace_id[:8]}", values, _crumbs(found, beside), live)


def _crumbs(found: FoundTrace, beside: TraceNeighbours) -> tuple[Crumb, ...]:
    """Return the way to a trace; over the list that it was opened from, as that was."""
    training = found.lineage.for_training
    where, named = (addresses.step, "step") if training else (addresses.evaluation, "evaluation of policy")
    above = Crumb(f"{named} {found.step}", where(found.run, found.step, **beside.chosen))
    return Crumb(found.run, addresses.run(found.run)), above


def _fold(text: str) -> Values | None:
    """Return a JSON text as it is; None where it says nothing."""
    return None if text in ("", "{}", "null") else long_text(text)


def _error(row: Mapping[str, Any]) -> Values | None:
    if row["error_class"] is None:
        return None
    texts = {"message": row["error_message"], "traceback": row["error_traceback"]}
    shown = {name: long_text(text) if text else None for name, text in texts.items()}
    return {"class": row["error_class"], "type": row["error_type"], **shown}


def outcome(library: StoreReader, found: FoundTrace) -> Values:
    """Return what the run made of the trace: a sentence, its outcome, the verdict's numbers, group and quarantines."""
    use = outcome_of(library, found)
    verdict = use["verdict"]
    return {
        "sentence": sentence({"trace": found.row}, use),
        **{
            name: use[name]
            for name in ("outcome", "detail", "group", "decision", "regrade", "quarantines", "notes", "keys")
        },
        "tone": TONES.get(use["outcome"], ""),
        "verdict": verdict and {name: verdict[name] for name in ("keep", "reason", "detected")},
        "evidence": [
            {"filter": name, "numbers": [{"name": path, "value": value} for path, value in flat(numbers)]}
            for name, numbers in (verdict or {"evidence": {}})["evidence"].items()
        ],
    }


def timing(row: Mapping[str, Any]) -> list[Values]:
    """Return the spans of a rollout in order: name, seconds; the generation with the model's share of it."""
    spans = [{"name": name, "seconds": row[f"{name}_seconds"], "inside": None} for name in SPANS]
    spans[1]["inside"] = {"name": "model", "seconds": row["model_seconds"]}
    return spans


def trained_in(library: StoreReader, found: FoundTrace) -> list[Values]:
    """Return the samples that the trace became, each with the batch row that it is in, and that row's address.

    The address is None where the step was done again since: the page of its batch has the rows that were trained last.
    `weights` are the sums of the weights by component that the row has for the sample, None where it is in none.
    """
    packed, made = found.lineage.batches, found.lineage.updates
    own = samples(library, found)
    sums = packed_weights(library, found, own).with_columns(pl.col(WEIGHTS).cast(pl.List(pl.Float64)).list.sum())
    weights = {row.pop("sample_id"): row for row in sums.to_dicts()}
    rows = own.drop("path").to_dicts()
    gone = packed is not None and has_lost_rows(library, [packed], "batches")
    shown = batch.packed_step(library, found.run, packed.step).batches.key if packed else None
    for each in rows:
        known = packed is not None and each["row"] is not None
        is_shown = packed and known and packed.key == shown
        each["address"] = addresses.row(found.run, packed.step, each["row"]) if packed and is_shown else None
        each["weights"] = weights.get(each["sample_id"])
        each["trained"] = None if gone and not known else bool(known and made)
    return rows


def policies(library: StoreReader, found: FoundTrace) -> Values:
    """Return the policy that sampled the trace and the one that training on it made; null where there is none.

    Of a trace that several policies sampled it is the oldest, and `parts` has each with its number of tokens.
    """
    made, key = found.lineage.updates, str(found.row["policy_key"])
    after = {"run": found.run, "version": policy_version(made), "key": made.key} if made else None
    return {
        "sampled": _sampler(library, found, key) if key else None,
        "parts": _samplers_of_parts(library, found),
        "made": after and after | {"address": addresses.step(found.run, made.step)} if made else None,
    }


def _samplers_of_parts(library: StoreReader, found: FoundTrace) -> list[Values]:
    parts = token_policies(library, found).group_by("policy_version", "policy_key").agg(pl.col("num_tokens").sum())
    return [
        _sampler(library, found, key, version) | {"num_tokens": count}
        for version, key, count in parts.sort("policy_version").iter_rows()
    ]


def _sampler(library: StoreReader, found: FoundTrace, key: str, version: int | None = None) -> Values:
    work = library.graph.works.get(key)
    version = found.row["policy_version"] if version is None else version
    known = {"key": key, "version": version, "run": None, "address": None}
    if work is None:
        return known
    run = found.run if found.run in work.runs else work.runs[0]
    trained = policy_version(work)
    address = addresses.step(run, trained - 1) if trained else addresses.run(run)
    return known | {"run": run, "version": trained, "address": address}


def _around(library: StoreReader, found: FoundTrace, asked: PageRequest) -> Values:
    """Return the traces around it: of its group, its episode and its example.

    `history` is None where nobody asked for it and it costs more than the rest: every batch of a large run is read.
    """
    wanted = asked.flag("history") or asked.text("format") in ("json", "file")
    with_history = wanted or len(library.history(found.run).lineages) <= SMALL_RUN
    return {
        "mates": _with_links(found, mates(library, found)),
        "episode": _with_links(found, episode(library, found)),
        "history": _with_links(found, history(library, found)) if with_history else None,
    }


def _neighbour_links(beside: TraceNeighbours) -> Values:
    """Return the traces before and after it; `walking` is what the list was asked for in which these are its own."""
    (previous, previous_key), (following, next_key) = (each or (None, None) for each in (beside.previous, beside.next))
    return {
        "place": beside.place,
        "num_traces": beside.num_traces,
        "previous": previous,
        "previous_key": previous_key,
        "next": following,
        "next_key": next_key,
        "walking": beside.chosen,
    }


def _with_links(found: FoundTrace, rows: pl.DataFrame) -> list[Values]:
    shown = rows.to_dicts()
    for row in shown:
        row["here"] = row["trace_id"] == found.trace_id
        row["address"] = addresses.trace(found.run, row["trace_id"], row["key"])
    return shown


class _Conversation:
    """The messages of a trace in the window and the branch that an address asks for."""

    def __init__(self, library: StoreReader, found: FoundTrace, asked: PageRequest) -> None:
        self.library, self.found, self.asked = library, found, asked
        self.rows = messages(library, found)
        self.whole = reading(self.rows)
        branch = asked.text("branch")
        self.branch = asked.number("branch", 0, most=max(len(self.whole.paths) - 1, 0)) if branch else None
        self.view = self.whole if self.branch is None else reading(self.rows, self.branch)
        self.start, self.window = self._window()

    def values(self) -> Values:
        """Return the messages, their tokens, and how they can be read and coloured."""
        library, found, asked = self.library, self.found, self.asked
        numbers, first = [line.message for line in self.window], asked.number("at", 0) if asked.text("message") else 0
        drawn, measured = shown_tokens(library, found, numbers, first)
        return {
            "branches": [
                {"branch": branch, "num_messages": len(path), "leaf": path[-1]}
                for branch, path in enumerate(self.whole.paths)
            ],
            "graph": self._graph(),
            "branch": self.branch,
            "num_messages": len(self.view.lines),
            "from": self.start,
            "window": WINDOW,
            "alone": bool(asked.text("message")),
            "messages": self._messages(numbers, drawn),
            "tokens": describe(drawn),
            "scaled": scaled_weights(measured),
            "tokenizer": tokenizer(library, found)[1],
            "view": asked.one_of("view", VIEWS, "both"),
            "color": asked.one_of("color", NAMES, default_colouring(measured)),
            "colourings": colourings(library, found, measured),
            "q": asked.text("q"),
            "hits": self._hits(),
            "most_hits": MOST_HITS,
        }

    def _graph(self) -> Values:
        """Return the graph as it is drawn, where it has forks and can be seen as a whole."""
        paths = self.whole.paths
        if not (1 < len(paths) <= MOST_BRANCHES and max(map(len, paths)) <= MOST_ACROSS):
            paths = []
        roles = {
            str(message): f"by-{role if role in ROLES else 'other'}"
            for message, role in self.rows.select("message", "role").iter_rows()
            if paths
        }
        ways = [self.asked.but(branch=branch, message=None, to=None) for branch in range(len(paths))]
        return {"paths": paths, "roles": roles, "addresses": ways, "broken": self.whole.broken}

    def _window(self) -> tuple[int, Sequence[Line]]:
        """Return where the window begins in the order of reading, and its lines."""
        asked, lines = self.asked, self.view.lines
        if asked.text("message"):
            number = asked.number("message", 0)
            for place, line in enumerate(lines):
                if line.message == number:
                    return place, [line]
            raise BadQuestion(f"message={number}: there is no such message among the {len(lines)} of the trace")
        to = asked.one_of("to", JUMPS, "")
        start = self._jump(to) if to else asked.number("from", 0)
        # An address may be older than the branch that is shown now: it opens the end, not an error.
        start = min(start, max(len(lines) - 1, 0))
        return start, lines[start : start + WINDOW]

    def _jump(self, to: str) -> int:
        if to == "trained":
            trained = {*tokens(self.library, self.found, texts=False).filter("trained")["message"].unique()}
            return next((place for place, line in enumerate(self.view.lines) if line.message in trained), 0)
        # What went wrong ended the rollout, so its error is where the messages end.
        return max(len(self.view.lines) - WINDOW, 0) if to in ("last", "error") else 0

    def _messages(self, numbers: Sequence[int], drawn: Mapping[int, Values]) -> list[Values]:
        shown = self.rows.filter(pl.col("message").is_in(numbers))
        row_of = {row["message"]: row for row in shown.iter_rows(named=True)}
        pictures = images(self.library, self.found, [row["body"] for row in row_of.values()])
        rejected = set(rejected_messages(self.found, self.rows))
        read = [read_message(row_of[number], pictures) for number in numbers]
        link_calls(read)
        text = self.asked.text("q").casefold()
        for line, message in zip(self.window, read, strict=True):
            row = row_of[line.message]
            message |= {
                "branch": line.branch,
                "goes_on_from": line.goes_on_from,
                "rejected": line.message in rejected,
                "hit": bool(text) and (text in (row["content"] or "").casefold() or text in row["body"].casefold()),
                "tokens": drawn.get(line.message),
            }
        return read

    def _hits(self) -> list[Values]:
        """Return the places of a text with where their window begins."""
        places = {line.message: place for place, line in enumerate(self.view.lines)}
        found = [hit for hit in hits(self.rows, self.asked.text("q")) if hit["message"] in places]
        return [hit | {"from": places[hit["message"]] // WINDOW * WINDOW} for hit in found]


def any_trace_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the runs that use a trace, each with the trace's outcome and the address of its page there.

    Of a trace that one run uses it is the page in that run. Raises NotThere, with the nearest ids, where none does.
    """
    given = asked.path["trace"]
    found = uses(library, given)
    if not found:
        near = nearest(given, index(library, library.graph.makers("traces"))["trace_id"])
        hint = f"; the nearest ids are {', '.join(near)}" if near else ""
        raise NotThere(f"no run of {library.store.root.address} has a trace {given!r}{hint}")
    trace_id = found[0].trace_id
    if len(found) == 1:
        path, query = {"run": found[0].run, "trace": trace_id}, {**asked.query, "key": found[0].key}
        return trace_page(library, PageRequest(addresses.trace(found[0].run, trace_id), path, query))
    values = {"trace_id": trace_id, "uses": [_use(library, each) for each in found]}
    return Page("any_trace.html", f"Trace {trace_id[:8]}", values)


def _use(library: StoreReader, found: FoundTrace) -> dict[str, object]:
    made = outcome_of(library, found)
    samples = [sample for sample in made["samples"] if sample["advantage"] is not None]
    return {
        "run": found.run,
        "step": found.step,
        "for_training": found.lineage.for_training,
        "key": found.key,
        "reward": found.row["reward"],
        "advantage": samples[0]["advantage"] if samples else None,
        **{name: made[name] for name in ("outcome", "detail", "policy")},
        "computed_by": found.lineage.traces.computed_by,
        "address": addresses.trace(found.run, found.trace_id, found.key),
    }

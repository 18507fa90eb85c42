"""A trace: its outcome and why, its conversation, and its tokens with all that was measured of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.messages import (
    WINDOW,
    branches,
    images,
    long_text,
    message_works,
    messages,
    read_message,
)
from flows.queries.reader import read_json, reward_parts
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollouts import neighbours_of_trace
from flows.queries.row_lineage import policy_version
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows, flat, has_lost_rows
from flows.queries.tokens import (
    NAMES,
    colourings,
    default_colouring,
    scaled_weights,
    shown_tokens,
    token_policies,
    tokenizer,
    tokens,
)
from flows.queries.trace import (
    FoundTrace,
    find_trace,
    other_runs,
    outcome_of,
    samples,
    trace_use,
)
from flows.queries.views import EXPIRED
from flows.viewer import addresses
from flows.viewer.addresses import Page
from tasks.arrays.finding import QUARANTINED
from tasks.arrays.message_graph import BrokenGraph
from tasks.inference.trace_rows.failures import UNSCORED
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED

VIEWS = ("both", "text", "tokens")
JUMPS = ("first", "last", "trained")
ERROR = ("error_class", "error_type", "error_message", "error_traceback")
LEFT_OUT = ("rewards", "metrics", "info", "record", *ERROR)
"""Columns of a trace that the page shows in parts of their own."""
OF_REQUEST = ("temperature", "seed", "cache_salt", "detokenize")
"""Fields of a request that are shown elsewhere, or are no settings."""
TONES = {
    **{TRAINED: "good", PENDING: "going"},
    **dict.fromkeys((FILTERED, REFUSED, NO_WEIGHT, EXPIRED), "warn"),
    **dict.fromkeys((ERRORED, STOPPED, STALE, UNSCORED, QUARANTINED), "bad"),
}
SHOWN = ("outcome", "detail", "group", "verdict", "regrade", "judgements", "decision", "quarantines", "notes")
"""Parts of an outcome that the page shows."""
Values = dict[str, Any]


def trace_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return a trace as a run uses it.

    The request may have: `key` (the work that made it), `branch`, `from` (the first message of the window), `to`
    (first, last or trained, instead), `message` (that one alone, `at` its first token), `view` and `color`.
    """
    trace = find_trace(reader, request.path["run"], request.path["trace"], request.text("key"))
    run, row, for_training = trace.run, trace.row, trace.lineage.for_training
    values = {
        **{"run": run, "trace_id": trace.trace_id, "key": trace.key, "step": trace.step, "for_training": for_training},
        "retired": expired_rows(reader, (*trace.lineage.works, *message_works(reader, trace))),
        "trace": {name: value for name, value in row.items() if name not in LEFT_OUT},
        "error": _error(row),
        "reward_parts": reward_parts(row["rewards"]),
        "metrics": read_json(row["metrics"]),
        "sampling": _sampling(read_json(row["record"])),
        **{name: None if row[name] in ("", "{}", "null") else long_text(row[name]) for name in ("info", "record")},
        "outcome": _outcome(reader, trace),
        "samples": trained_in(reader, trace),
        "policies": _policies(reader, trace),
        "other_runs": other_runs(trace),
        **neighbours_of_trace(reader, trace),
        **_Conversation(reader, trace, request).values(),
    }
    where, title = (addresses.step, "step") if for_training else (addresses.evaluation, "evaluation of policy")
    crumbs = ((run, addresses.run(run)), (f"{title} {trace.step}", where(run, trace.step)))
    # What is pending may be decided while somebody looks; nothing else of a trace ever changes.
    live = values["outcome"]["outcome"] == PENDING and any_going(reader, run)
    return Page("trace.html", f"Trace {trace.trace_id[:8]}", values, crumbs, live)


def any_trace_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return a trace as the first run has it that uses it; further ones are named on it.

    Raises NotThere where no run uses it.
    """
    trace = trace_use(reader, request.path["trace"])
    address = addresses.trace(trace.run, trace.trace_id)
    path, query = {"run": trace.run, "trace": trace.trace_id}, {**request.query, "key": trace.key}
    return trace_page(reader, PageRequest(address, path, query))


def _sampling(record: Any) -> Values:
    """Return the settings of sampling that a trace says its agent had, beside the temperature."""
    try:
        settings = record["agent"]["config"]["sampling"].items()
    except (KeyError, TypeError, AttributeError):  # rows without a trace, or of others
        return {}
    return {name: value for name, value in settings if value is not None and name not in OF_REQUEST}


def _error(row: Mapping[str, Any]) -> Values | None:
    if row["error_class"] is None:
        return None
    texts = {name: row[f"error_{name}"] for name in ("message", "traceback")}
    folded = {name: long_text(text) if text else None for name, text in texts.items()}
    return {"class": row["error_class"], "type": row["error_type"], **folded}


def _outcome(reader: StoreReader, trace: FoundTrace) -> Values:
    """Return the outcome of the trace in its run: the verdict's numbers, the decision, group, notes and quarantines."""
    use = outcome_of(reader, trace)
    evidence = use["verdict"]["evidence"] if use["verdict"] else {}
    return {
        **{name: use[name] for name in SHOWN},
        "tone": TONES.get(use["outcome"], ""),
        "evidence": [
            {"filter": name, "numbers": [{"name": path, "value": value} for path, value in flat(numbers)]}
            for name, numbers in evidence.items()
        ],
    }


def trained_in(reader: StoreReader, trace: FoundTrace) -> list[Values]:
    """Return the samples that the trace became, each with the batch row that it is in, and that row's address.

    The address is None where the step was done again since: the page of its batch has the rows that were trained last.
    `weights` are the sums of the weights by component that the row has for the sample, None where it is in none.
    """
    packed, updates = trace.lineage.batches, trace.lineage.updates
    gone = packed is not None and has_lost_rows(reader, [packed], "batches")
    is_last = packed is not None and batch.packed_step(reader, trace.run, packed.step).batches.key == packed.key
    linked = []
    for row in samples(reader, trace).drop("path").to_dicts():
        in_batch = packed is not None and row["row"] is not None
        address = addresses.row(trace.run, packed.step, row["row"]) if packed and in_batch and is_last else None
        trained = None if gone and not in_batch else bool(in_batch and updates)
        linked.append({**row, "address": address, "weights": row["weights"] if in_batch else None, "trained": trained})
    return linked


def _policies(reader: StoreReader, trace: FoundTrace) -> Values:
    """Return the policies that sampled the trace, each with its number of tokens, and the one that training made."""
    updates, version = trace.lineage.updates, trace.row["policy_version"]
    parts = token_policies(reader, trace).group_by("policy_version", "policy_key").agg(pl.col("num_tokens").sum())
    rows = [*parts.sort("policy_version").iter_rows()] or [(version, str(trace.row["policy_key"]), None)]
    return {
        "sampled": [_sampler(reader, trace, *row) for row in rows if row[1]],
        "made": updates and {"version": policy_version(updates), "address": addresses.step(trace.run, updates.step)},
    }


def _sampler(reader: StoreReader, trace: FoundTrace, version: int, key: str, num_tokens: int | None) -> Values:
    work, address = reader.graph.works.get(key), None
    if work is not None:
        run, version = trace.run if trace.run in work.runs else work.runs[0], policy_version(work)
        address = addresses.step(run, version - 1) if version else addresses.run(run)
    return {"key": key, "version": version, "num_tokens": num_tokens, "address": address}


class _Conversation:
    """The messages of a trace in the window and the branch that an address asks for."""

    def __init__(self, reader: StoreReader, trace: FoundTrace, request: PageRequest) -> None:
        self.reader, self.trace, self.request = reader, trace, request
        self.rows = messages(reader, trace)
        self.paths, self.broken = self._paths()
        has_branch = bool(request.text("branch"))
        self.branch = request.number("branch", 0, most=max(len(self.paths) - 1, 0)) if has_branch else None
        self.numbers = self.rows["message"].to_list() if self.branch is None else self.paths[self.branch]
        self.alone = bool(request.text("message"))
        self.start, self.window = self._window()

    def _paths(self) -> tuple[Sequence[Sequence[int]], str]:
        """Return the branches, and what is wrong with a graph that has none."""
        try:
            return branches(self.rows), ""
        except BrokenGraph as error:
            return [], str(error)

    def values(self) -> Values:
        """Return the messages, their tokens, and how they can be read and coloured."""
        reader, trace, request = self.reader, self.trace, self.request
        drawn, measured = shown_tokens(reader, trace, self.window, request.number("at", 0) if self.alone else 0)
        return {
            "branches": [
                {"branch": branch, "num_messages": len(path), "leaf": path[-1]}
                for branch, path in enumerate(self.paths)
            ],
            "broken": self.broken,
            "branch": self.branch,
            "num_messages": len(self.numbers),
            "from": self.start,
            "window": WINDOW,
            "alone": self.alone,
            "messages": self._messages(drawn),
            "scaled": scaled_weights(measured),
            "tokenizer": tokenizer(reader, trace)[1],
            "view": request.one_of("view", VIEWS, "both"),
            "color": request.one_of("color", NAMES, default_colouring(measured)),
            "colourings": colourings(measured),
        }

    def _window(self) -> tuple[int, Sequence[int]]:
        """Return where the window begins among the messages, and the messages in it."""
        request, numbers = self.request, self.numbers
        if self.alone:
            number = request.number("message", 0)
            if number not in numbers:
                raise BadQuestion(f"message={number}: there is no such message among the {len(numbers)} of the trace")
            return numbers.index(number), [number]
        jump = request.one_of("to", JUMPS, "")
        start = self._jump(jump) if jump else request.number("from", 0)
        # An address may be older than the branch that is shown now: it opens the end, not an error.
        start = min(start, max(len(numbers) - 1, 0))
        return start, numbers[start : start + WINDOW]

    def _jump(self, to: str) -> int:
        if to == "trained":
            trained = {*tokens(self.reader, self.trace, texts=False).filter("trained")["message"].unique()}
            return next((place for place, message in enumerate(self.numbers) if message in trained), 0)
        return max(len(self.numbers) - WINDOW, 0) if to == "last" else 0

    def _messages(self, drawn: Mapping[int, Values]) -> list[Values]:
        shown = self.rows.filter(pl.col("message").is_in(self.window)).to_dicts()
        pictures = images(self.reader, self.trace, [row["body"] for row in shown])
        read: list[Values] = []
        for row in shown:
            number, parent = row["message"], row["parent"]
            is_next = not read or parent == read[-1]["message"]
            told = {"follows": None if is_next else -1 if parent is None else parent}
            read.append(read_message(row, pictures) | told | {"tokens": drawn.get(number)})
        return read

"""A trace: its outcome and why, its conversation, and its tokens with all that was measured of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.messages import (
    MOST_HITS,
    WINDOW,
    MessageView,
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
from flows.queries.outcomes import EXPIRED
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
    TRAINED: "good",
    FILTERED: "warn",
    REFUSED: "warn",
    NO_WEIGHT: "warn",
    ERRORED: "bad",
    STOPPED: "bad",
    STALE: "bad",
}
TONES |= {PENDING: "going", QUARANTINED: "bad", EXPIRED: "warn"}
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
        **_conversation(library, found, asked),
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


def _conversation(library: StoreReader, found: FoundTrace, asked: PageRequest) -> Values:
    rows = messages(library, found)
    whole = reading(rows)
    branch = _branch(asked, whole)
    view = whole if branch is None else reading(rows, branch)
    start, window = _window(library, found, asked, view)
    numbers = [line.message for line in window]
    drawn, measured = shown_tokens(library, found, numbers, asked.number("at", 0) if asked.text("message") else 0)
    default = default_colouring(measured)
    return {
        "branches": [
            {"branch": each, "num_messages": len(path), "leaf": path[-1]} for each, path in enumerate(whole.paths)
        ],
        "graph": _graph(rows, whole, asked),
        "branch": branch,
        "num_messages": len(view.lines),
        "from": start,
        "window": WINDOW,
        "alone": bool(asked.text("message")),
        "messages": _messages(library, found, rows, window, drawn, asked.text("q")),
        "tokens": describe(drawn),
        "scaled": scaled_weights(measured),
        "tokenizer": tokenizer(library, found)[1],
        "view": asked.one_of("view", VIEWS, "both"),
        "color": asked.one_of("color", NAMES, default),
        "colourings": colourings(library, found, measured),
        "q": asked.text("q"),
        "hits": _hits(rows, view, asked.text("q")),
        "most_hits": MOST_HITS,
    }


def _graph(rows: pl.DataFrame, whole: MessageView, asked: PageRequest) -> Values:
    """Return the graph as it is drawn, where it has forks and can be seen as a whole."""
    forks = 1 < len(whole.paths) <= MOST_BRANCHES and max(map(len, whole.paths)) <= MOST_ACROSS
    paths = whole.paths if forks else []
    by_number = rows.select("message", "role").iter_rows() if forks else ()
    roles = {str(message): f"by-{role if role in ROLES else 'other'}" for message, role in by_number}
    ways = [asked.but(branch=each, message=None, to=None) for each in range(len(paths))]
    return {"paths": paths, "roles": roles, "addresses": ways, "broken": whole.broken}


def _branch(asked: PageRequest, whole: MessageView) -> int | None:
    return asked.number("branch", 0, most=max(len(whole.paths) - 1, 0)) if asked.text("branch") else None


def _window(
    library: StoreReader, found: FoundTrace, asked: PageRequest, view: MessageView
) -> tuple[int, Sequence[Any]]:
    """Return where the window begins in the order of reading, and its lines."""
    if asked.text("message"):
        wanted = asked.number("message", 0)
        places = [place for place, line in enumerate(view.lines) if line.message == wanted]
        if not places:
            raise BadQuestion(f"message={wanted}: there is no such message among the {len(view.lines)} of the trace")
        return places[0], [view.lines[places[0]]]
    start = asked.number("from", 0)
    to = asked.one_of("to", JUMPS, "")
    if to:
        start = _jump(library, found, view, to)
    # An address may be older than the branch that is shown now: it opens the end, not an error.
    start = min(start, max(len(view.lines) - 1, 0))
    return start, view.lines[start : start + WINDOW]


def _jump(library: StoreReader, found: FoundTrace, view: MessageView, to: str) -> int:
    if to == "trained":
        own = tokens(library, found, texts=False).filter("trained")["message"].unique()
        trained = set(own)
        return next((place for place, line in enumerate(view.lines) if line.message in trained), 0)
    # What went wrong ended the rollout, so its error is where the messages end.
    return max(len(view.lines) - WINDOW, 0) if to in ("last", "error") else 0


def _messages(
    library: StoreReader,
    found: FoundTrace,
    rows: pl.DataFrame,
    window: Sequence[Any],
    drawn: Mapping[int, Values],
    wanted: str,
) -> list[Values]:
    numbers = [line.message for line in window]
    of_window = {row["message"]: row for row in rows.filter(pl.col("message").is_in(numbers)).iter_rows(named=True)}
    pictures = images(library, found, [row["body"] for row in of_window.values()])
    gone = set(rejected_messages(found, rows))
    read = [read_message(of_window[number], pictures) for number in numbers]
    link_calls(read)
    low = wanted.casefold()
    for line, each in zip(window, read, strict=True):
        row = of_window[line.message]
        each["branch"] = line.branch
        each["goes_on_from"] = line.goes_on_from
        each["rejected"] = line.message in gone
        each["hit"] = bool(low) and (low in (row["content"] or "").casefold() or low in row["body"].casefold())
        each["tokens"] = drawn.get(line.message)
    return read


def _hits(rows: pl.DataFrame, view: MessageView, wanted: str) -> list[Values]:
    """Return the places of a text with where their window begins."""
    places = {line.message: place for place, line in enumerate(view.lines)}
    found = [each for each in hits(rows, wanted) if each["message"] in places]
    return [each | {"from": places[each["message"]] // WINDOW * WINDOW} for each in found]


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

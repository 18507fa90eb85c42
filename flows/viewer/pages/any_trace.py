"""A trace, whichever runs use it: each of them with what it made of it."""

from flows.viewer import addresses
from flows.viewer.data.trace import Found, outcome_of, uses
from flows.viewer.data.trace_index import index
from flows.viewer.library import Library
from flows.viewer.page import Asked, NotThere, Page
from flows.viewer.pages import trace
from flows.views.identify import nearest


def page(library: Library, asked: Asked) -> Page:
    """Return the runs that use a trace, each with the trace's fate and the address of its page there.

    Of a trace that one run uses it is the page in that run. Raises NotThere, with the nearest ids, where none does.
    """
    given = asked.path["trace"]
    found = uses(library, given)
    if not found:
        known = index(library, library.graph.making("traces"))["trace_id"]
        near = nearest(given, known)
        told = f"; the nearest ids are {', '.join(near)}" if near else ""
        raise NotThere(f"no run of {library.store.root.address} has a trace {given!r}{told}")
    trace_id = found[0].trace_id
    if len(found) == 1:
        (only,) = found
        path = {"run": only.run, "trace": trace_id}
        return trace.page(library, Asked(addresses.trace(only.run, trace_id), path, {**asked.query, "key": only.key}))
    values = {"trace_id": trace_id, "uses": [_use(library, each) for each in found]}
    return Page("any_trace.html", f"Trace {trace_id[:8]}", values)


def _use(library: Library, found: Found) -> dict[str, object]:
    made = outcome_of(library, found)
    samples = [sample for sample in made["samples"] if sample["advantage"] is not None]
    return {
        "run": found.run,
        "step": found.step,
        "for_training": found.chain.for_training,
        "key": found.key,
        "reward": found.row["reward"],
        "advantage": samples[0]["advantage"] if samples else None,
        "fate": made["fate"],
        "detail": made["detail"],
        "policy": made["policy"],
        "computed_by": found.chain.traces.computed_by,
        "address": addresses.trace(found.run, found.trace_id, found.key),
    }

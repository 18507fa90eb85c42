"""The use of a trace that is meant where only its id is given: on a terminal, in a notebook."""

from flows.queries.request import NotThere
from flows.queries.store_reader import Library
from flows.viewer.data.trace import Found, find_trace, uses
from flows.viewer.data.trace_index import index
from flows.views.identify import nearest


def trace_use(library: Library, trace_id: str, run: str = "") -> Found:
    """Return a trace by its id, or the first eight characters of it or more, as a run uses it.

    Without a run it is as the run has it that computed it. Raises NotThere, with the nearest ids.
    """
    if run:
        return find_trace(library, run, trace_id)
    found = uses(library, trace_id)
    if not found:
        near = nearest(trace_id, index(library, library.graph.makers("traces"))["trace_id"])
        told = f"; the nearest ids are {', '.join(near)}" if near else "; `stagecoach traces RUN` lists those of a run"
        raise NotThere(f"no run of {library.store.root.address} has a trace {trace_id!r}{told}")
    return next((each for each in found if each.run == each.lineage.traces.computed_by), found[0])

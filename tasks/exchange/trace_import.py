"""Import of traces: rollouts that were made elsewhere become the examples, assignments and traces of a run.

Reads nothing but its source; writes examples, then assignments, then traces, messages and their images, as if they
had been sampled.
"""

from typing import Protocol

import pyarrow as pa

from configs.run import View
from tasks.inference.trace_rows.images import extract_images
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Stage, Tables


class TraceSource(Protocol):
    """What the stages ask of whoever has read the files."""

    def examples(self) -> pa.Table:
        """Return the examples that were tried, in the EXAMPLES schema."""
        ...

    def assignments(self, step: int) -> pa.Table:
        """Return the assignments of a step, in the ASSIGNMENTS schema."""
        ...

    def traces(self, step: int) -> pa.Table:
        """Return the traces of a step, in the TRACES schema."""
        ...

    def messages(self, step: int) -> pa.Table:
        """Return the messages of a step, in the MESSAGES schema."""
        ...


def imported_examples(tables: Tables, config: View, *, source: TraceSource) -> Tables:
    """List the examples that the imported rollouts tried."""
    return {"examples": source.examples()}


def imported_assignments(tables: Tables, config: View, *, step: int, source: TraceSource) -> Tables:
    """Say which examples a step tried, in which groups."""
    return {"assignments": source.assignments(step)}


def trace_import(tables: Tables, config: View, *, step: int, source: TraceSource) -> Tables:
    """Bring in the rollouts of a step; they answer its assignments."""
    return extract_images(source.traces(step), source.messages(step))


EXAMPLES_STAGE = Stage(
    name="examples",
    version=2,
    reads=(),
    writes=("examples",),
    sections=(),
    function=imported_examples,
)
ASSIGNMENT_STAGE = Stage(
    name="assignment",
    version=2,
    reads=("examples",),
    writes=("assignments",),
    sections=(),
    function=imported_assignments,
)
STAGE = Stage(
    name="import",
    version=2,
    reads=("assignments", "examples"),
    writes=("traces", "messages", "images"),
    optional=("images",),
    sections=(),
    function=trace_import,
)
examples_task = as_task(EXAMPLES_STAGE)
assignment_task = as_task(ASSIGNMENT_STAGE)
task = as_task(STAGE)

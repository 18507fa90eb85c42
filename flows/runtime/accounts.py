"""check_account: whether each rollout of a batch is trained on, filtered or unusable, once. Called before training."""

from flows.runtime.records import StepBatch
from tasks.metrics.accounting import COLUMNS as TRACE_COLUMNS
from tasks.metrics.accounting import AccountBreach, account, taken_assignments
from tasks.runtime.run_context import RunContext


def check_account(context: RunContext, batch: StepBatch) -> None:
    """Account for every rollout of a step. Raises AccountBreach where one is lost or counted twice."""
    written = {table for ref in batch.traces for table, _ in ref.rows}
    groups = [table for table in ("intakes", "stale_groups") if table in written]
    tables = (
        # With intakes, groups of other steps' assignments are among them.
        taken_assignments(*(context.table(table, batch.traces) for table in groups))
        if "intakes" in written
        else context.table("assignments", batch.assignments, ["assignment_id"]),
        context.table("traces", batch.traces, TRACE_COLUMNS),
        context.table("verdicts", [batch.filtering], ["trace_id", "keep", "reason"]),
        context.table("samples", [batch.advantage], ["sample_id", "trace_id"]),
        context.table("batches", [batch.packing], ["sample_ids"]),
    )
    try:
        account(*tables)
    except AccountBreach as error:
        # `account` knows tables alone, not their run.
        error.add_note(f"Run {context.run}, step {batch.packing.step}, between the stages packing and training.")
        raise

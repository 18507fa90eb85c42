"""perform: runs one stage, unless the ledger has its result: key, ledger, inputs, compute, slices, ledger row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from storage.errors import disk_refusal
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Attempt, Policy, Ref, Stage, inputs_of, ref_of


def perform(
    stage: Stage[Any],
    context: RunContext,
    step: int,
    refs: Sequence[Ref] = (),
    policy: Policy | None = None,
    services: Services | None = None,
    parameters: Any = None,
    extra_inputs: Mapping[str, str] | None = None,
    when_computed: Callable[[], None] | None = None,
) -> Ref:
    """Run one stage, unless the ledger has it already: the only way in which work is done.

    `parameters` is the record of this one call that the stage's `read_inputs` expects; what it means for the rows must
    be in the key, by `extra_inputs`: digests of inputs that are no tables (a file, the number of a batch attempt).
    `when_computed` is called when the stage's function has returned, before its rows are committed. Raises what
    the stage raises, with a note that names run, step and stage and says that nothing of the attempt is visible.
    """
    inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
    key = context.key(stage, step, inputs)
    entry = context.find(key)
    if entry is not None:
        # Found, perhaps in another run: a row of this run's own points at the same slices.
        return ref_of(context.adopt(entry, step), computed=False)
    services = services or Services()
    attempt = Attempt(stage, context, step, key, inputs, policy, refs, services, parameters, when_computed)
    try:
        return ref_of(attempt.compute(), computed=True)
    except Exception as error:
        # Whichever library or process noticed it: of a disk that takes nothing the traceback says less than the place.
        where = str(getattr(error, "filename", None) or context.store.root.address)
        refusal = disk_refusal(f"stage {stage.name} of step {step} ({error})", error, where)
        (refusal or error).add_note(
            f"Run {context.run}, step {step}, stage {stage.name}. Nothing of this attempt is visible; all earlier "
            f"stages are safe in the ledger. Call the same run again to go on from here."
        )
        if refusal:
            raise refusal from error
        raise
    finally:
        attempt.discard()

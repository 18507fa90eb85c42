"""StepBatch and FinishedStep: the references to the stage results of one training step, passed along its loop."""

from dataclasses import dataclass

from tasks.runtime.stage import Policy, Ref

Refs = tuple[Ref, ...]


@dataclass(frozen=True)
class StepBatch:
    """The stage results of one step, from its assignments to its packed batches."""

    assignments: Refs
    """Several where groups were replaced."""
    traces: Refs
    """The rollouts of each assignment in turn; where they were scored again, first the regraded rollouts."""
    filtering: Ref
    advantage: Ref
    packing: Ref

    @property
    def refs(self) -> Refs:
        """The references, in the order of the stages."""
        return *self.assignments, *self.traces, self.filtering, self.advantage, self.packing


@dataclass(frozen=True)
class FinishedStep:
    """One trained step."""

    step: int
    batch: StepBatch
    training: Ref
    metrics: Ref
    policy: Policy
    """The policy that the step made."""

    @property
    def refs(self) -> Refs:
        """The references, in the order of the stages."""
        return *self.batch.refs, self.training, self.metrics

"""Steps: what a walk through the stages is made of, whoever goes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.stage import Policy, Ref, StageTask


class Do(Protocol):
    """Does a stage, or says what doing it would be."""

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        services: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref: ...

    def decision(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return the row of a decision at a gate; None where it is still to be made, which is taken to let pass."""
        ...

    def missing(self, assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
        """Return how many groups of the first of some assignments have no replacement yet, by environment.

        None where that is still to be found out: what is to come is taken to be enough.
        """
        ...

    def num_errored(self, ref: Ref) -> int:
        """Return how many assignments of rollouts ended with an error; none where they are still to be made."""
        ...

    def explained(self, empty: "Sequence[Drawn]") -> str:
        """Return what became of the rollouts of batches that hold nothing to train on, and what to do, in lines."""
        ...

    def done(self, task: StageTask, step: int, refs: Sequence[Ref], policy: Policy) -> bool:
        """Tell whether this run itself has finished a stage before, or has taken it over from another run."""
        ...


@dataclass(frozen=True)
class Source:
    """What a run starts from, by digest: a directory of weights, and for supervised runs a file."""

    weights: str
    weights_digest: str
    data: str = ""
    data_digest: str = ""


@dataclass(frozen=True)
class Drawn:
    """One step's way from examples to packed batches."""

    assignments: tuple[Ref, ...]
    """What was tried; several where groups were replaced."""
    traces: tuple[Ref, ...]
    """The rollouts, those of each assignment in turn; where they were scored again, first what that made of them."""
    filtering: Ref
    advantage: Ref
    packing: Ref

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The references, in the order of the stages."""
        return *self.assignments, *self.traces, self.filtering, self.advantage, self.packing

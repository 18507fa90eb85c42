"""Services that stages ask: what each of them offers, and all of them together.

Stages know these protocols and their records only, and no stage is known here. `flows/services/` implements them:
engine, teachers, environments, learner, graders.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from tasks.runtime.refs import Policy

if TYPE_CHECKING:
    from configs.algorithms import TeacherConfig
    from configs.judges import JudgeConfig
    from tasks.inference.engine.client import ServedModel
    from tasks.learner.client import Learner

Returned = TypeVar("Returned")


class EngineService(Protocol):
    """The inference engine that serves the policies of a run, one at a time (`flows.services.engine`)."""

    def serve(self, policy: Policy) -> "ServedModel":
        """Return where `policy` is served, for who has it pinned or knows that nobody else asks for another."""
        ...

    def pinned(self, policy: Policy) -> AbstractContextManager["ServedModel"]:
        """Give where `policy` is served, checked against the learner's probe; it stays there within the block."""
        ...

    def exchange(self, policy: Policy, *, recompute: bool) -> "ServedModel | None":
        """Serve `policy` in place of the one that the caller has pinned, under its requests in flight; checked as well.

        None where others have it pinned too, or wait for another policy. With `recompute`, states of the older policy
        are computed again, else they are kept.
        """
        ...

    def addresses_now(self, known: Collection[str]) -> Mapping[str, Collection[str]]:
        """Return where the pinned policy is served now, under its empty name; engines of `known` URLs are not asked.

        An engine that has joined the run, or is back, is given the policy first, and checked.
        """
        ...


class TeacherService(Protocol):
    """The engines of frozen models (`flows.services.teachers`)."""

    def serve(self, teacher: "TeacherConfig | JudgeConfig") -> "ServedModel":
        """Return where a teacher is served, by the weights that its version says."""
        ...


class EnvironmentService(Protocol):
    """The servers of a run's environments (`flows.services.environments`)."""

    def addresses(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return for some environments the addresses of their servers that answer; waits where one has none."""
        ...

    def addresses_now(self, known: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return those of this moment, waiting for nothing; servers of `known` addresses are not asked."""
        ...


class ExampleSource(Protocol):
    """Whoever can load environments, in processes of their own (`flows.services.environments`)."""

    def examples(self, names: Collection[str]) -> pa.Table:
        """Return the examples of some environments of the run, in the EXAMPLES schema."""
        ...


class LearnerService(Protocol):
    """The process that trains (`flows.services.learner`)."""

    @property
    def state_directory(self) -> str:
        """Where the learner keeps optimizer state that is not saved; empty where it keeps none."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Let the learner compute within the block, which an engine on the same GPU may have to sleep for."""
        ...

    def restore(self, policy: Policy) -> "Learner":
        """Return a learner that holds the weights and the optimizer state of `policy`."""
        ...

    def load_fresh(self, policy: Policy, directory: Path) -> "Learner":
        """Return a learner that holds the weights in `directory` as `policy`, with no optimizer state."""
        ...


class GraderService(Protocol):
    """The processes that score recorded traces again (`flows.services.environments`)."""

    def scores(self, examples: pa.Table, traces: pa.Table, messages: pa.Table) -> pa.Table:
        """Return scores (see tasks.inference.grading.client.SCORES) of the traces that are not errored, by trace id."""
        ...


@dataclass(frozen=True)
class Shown:
    """A rollout that a person is shown."""

    label: str
    """best, median or worst by reward."""
    trace_id: str
    reward: float
    messages: tuple[tuple[str, str], ...]
    """Role and text, in the order of the trace."""


@dataclass(frozen=True)
class Question:
    """What a person is asked to approve."""

    step: int
    key: str
    """The key of the decision: the same question has the same key."""
    figures: Mapping[str, int | float | None]
    rollouts: tuple[Shown, ...]
    timeout_seconds: float
    about: str = "its batch"
    without: str = "gate.type=none"
    """The setting with which nobody is asked."""


@dataclass(frozen=True)
class Answer:
    """What a person said."""

    approved: bool
    by: str
    reason: str


Approve = Callable[[Question], Answer]
"""Asks a person and waits; raises where nobody answers in time or the run is cancelled."""


class Renderer(Protocol):
    """Turns the messages of a demonstration into the model's tokens.

    The renderer of a model that sees has `token_types` besides: the type of each token id that stands for something
    else than text.
    """

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Return one MESSAGES row, without its trace's id, for each message; the prompt offers the tools."""
        ...


@dataclass(frozen=True)
class Services:
    """The services of a run, each under the keyword by which stages ask for it; None where the run has none."""

    engine: EngineService | None = None
    teachers: TeacherService | None = None
    environments: EnvironmentService | None = None
    learner: LearnerService | None = None
    graders: GraderService | None = None
    example_source: ExampleSource | None = None
    approve: Approve | None = None
    """Asks a person at a gate."""
    render: Renderer | None = None
    """Turns demonstrations into tokens; it only computes, so nobody waits for it as for the others."""

    def only(self, names: Iterable[str]) -> "Services":
        """Return the same with no others than those of some names."""
        return Services(**{name: getattr(self, name) for name in names})


PROCESSES = ("engine", "teachers", "environments", "learner", "graders")
"""Services that are processes of a run, in the order in which they start."""
WAITS_FOR = frozenset({*PROCESSES, "example_source", "approve"})
"""Services that may take any time to answer, a person among them."""
REPEATABLE = frozenset({"learner", "render"})
"""Services that give the same again for the same."""


def require(service: Returned | None) -> Returned:
    """Return a service that a stage declares. Raises AssertionError if the run has none of its kind."""
    assert service is not None, "the run lacks a service that the stage declares"
    return service

"""The steps of a run as its work: which pieces belong together, the last batch of a step where there were several."""

from collections.abc import Sequence
from dataclasses import dataclass

from flows.queries.step_metrics import metrics_work
from flows.queries.store_reader import Library
from flows.views.show import STAGES
from storage.read.lineage import Graph, Work
from tasks.fates import Chain, age


@dataclass(frozen=True)
class StepWork:
    """The work of one step as far as it is done."""

    step: int
    traces: tuple[Work, ...]
    """The rollouts; several pieces where groups were replaced."""
    verdicts: Work | None
    batches: Work | None
    updates: Work | None
    last: Chain
    """What the rollouts went through together; of several pieces the last one, which shares its verdicts with all."""
    metrics: Work | None
    """What has the step's metrics; None as long as it is not finished."""
    works: tuple[Work, ...]
    """All of the step's work, in order of time; that of evaluations is none of it."""

    @property
    def finished(self) -> bool:
        """Whether the step is finished as far as it goes: then its metrics are written."""
        return self.metrics is not None


def steps_of(library: Library, run: str) -> list[StepWork]:
    """Return the steps of a run, in order. Raises NotThere for an unknown run."""
    by_step: dict[int, list[Chain]] = {}
    for chain in library.chains(run):
        if chain.for_training:
            by_step.setdefault(chain.traces.step, []).append(chain)
    graph = library.frames(run).graph
    return [_step(graph, step, _last_batch(found)) for step, found in sorted(by_step.items())]


def evaluations_of(library: Library, run: str) -> list[Work]:
    """Return the rollouts of a run that score a policy; the step of each is the policy's version."""
    return [chain.traces for chain in library.chains(run) if not chain.for_training]


def _last_batch(found: Sequence[Chain]) -> list[Chain]:
    """Return the rollouts that were judged together and trained last; else those judged last, else all of them."""
    trained = [(each.updates, each.verdicts) for each in found if each.updates and each.verdicts]
    judged = [(each.verdicts, each.verdicts) for each in found if each.verdicts]
    newest = max(trained or judged, key=lambda pair: age(pair[0]), default=None)
    if newest is None:
        return list(found)
    return [each for each in found if each.verdicts and each.verdicts.key == newest[1].key]


def _step(graph: Graph, step: int, found: Sequence[Chain]) -> StepWork:
    last = found[-1]
    traces = tuple(each.traces for each in found)
    metrics = metrics_work(graph, last)
    ends = (last.verdicts, last.credits, last.batches, last.decision, last.updates, metrics)
    works = _together(graph, step, [*traces, *(work for work in ends if work is not None)])
    return StepWork(step, traces, last.verdicts, last.batches, last.updates, last, metrics, works)


def _together(graph: Graph, step: int, ends: Sequence[Work]) -> tuple[Work, ...]:
    """Return some work of a step with what went into it within that step, in order of time."""
    found = {work.key: work for work in ends}
    edge = list(ends)
    while edge:
        near = {each.key: each for work in edge for each in graph.parents(work.key)}
        edge = [work for key, work in near.items() if key not in found and work.step == step and work.stage in STAGES]
        edge = [work for work in edge if work.stage != "training"]  # the step begins with its policy
        found |= {work.key: work for work in edge}
    return tuple(sorted(found.values(), key=age))

"""Drawing: a step's way from examples to packed batches, with other examples where too little is left to train on."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from configs.run import RunConfig
from configs.teaching import only_teachers_sample, scored_by_policy
from flows.steps import Do, Drawn
from tasks import advantage, assignment, demonstration, filtering, packing, reference, rollout
from tasks.stage import Policy, Ref


class Evicted(ValueError):
    """Every batch of a step was empty: the filters left nothing to train on."""


def draw(do: Do, step: int, found: Ref, policy: Policy, config: RunConfig, before: Drawn | None = None) -> Drawn:
    """Make the batches of one step; draw again while the filters leave nothing of them.

    `before` is what was drawn for the step before, whose state estimators and samplers go on from.

    Raises Evicted after `filtering.max_batch_attempts` empty batches.
    """
    earlier = (*before.assignments, *before.traces) if before else ()
    judge = partial(_judged, do, step, policy, config, before and before.advantage)
    way = fill if config.assignment.refill else _again
    empty: list[Drawn] = []
    for assigned, sampled, (verdicts, credits) in way(do, step, found, policy, config, earlier, judge):
        batches = do(packing.task, step, (credits, *sampled))
        drawn = Drawn(assigned, sampled, verdicts, credits, batches)
        if drawn.packing.num_rows("batches"):
            return drawn
        empty.append(drawn)
    what = f"step {step}: {sum(len(each.assignments) for each in empty)} batches in a row hold nothing to train on"
    raise Evicted(f"{what}. {do.explained(empty)}")


Judge = Callable[[tuple[Ref, ...]], tuple[Ref, Ref]]
"""Filters and credits rollouts; returns both."""

Judged = tuple[tuple[Ref, ...], tuple[Ref, ...], tuple[Ref, Ref]]
"""What a step has to be packed: its assignments, their rollouts, and how these were filtered and credited."""


def fill(
    do: Do, step: int, found: Ref, policy: Policy, config: RunConfig, earlier: Sequence[Ref], judge: Judge
) -> Iterator[Judged]:
    """Yield the rollouts of one step once, with groups in place of those that teach nothing (DAPO, arXiv 2503.14476).

    Each further assignment has as many groups of each environment as are missing, of other examples and with the same
    policy; all rollouts of the step are filtered and credited together. Ends when no group is missing, or after
    `filtering.max_batch_attempts` assignments with what there is, which may be nothing.
    """
    assigned = (assign(do, step, found, config, 0, earlier),)
    sampled = (_sampled(do, step, assigned[0], found, policy, config),)
    judged = judge(sampled)
    for batch in range(1, config.filtering.max_batch_attempts):
        groups = do.missing(assigned, judged[1])
        if not groups:
            break
        assigned = (*assigned, assign(do, step, found, config, batch, assigned, groups))
        sampled = (*sampled, _sampled(do, step, assigned[-1], found, policy, config))
        judged = judge(sampled)
    yield assigned, sampled, judged


def _again(
    do: Do, step: int, found: Ref, policy: Policy, config: RunConfig, earlier: Sequence[Ref], judge: Judge
) -> Iterator[Judged]:
    """Yield the rollouts of one step, again and again, each sampled in place of those before."""
    for batch in range(config.filtering.max_batch_attempts):
        assigned = assign(do, step, found, config, batch, earlier)
        sampled = _sampled(do, step, assigned, found, policy, config)
        yield (assigned,), (sampled,), judge((sampled,))
        earlier = assigned, sampled


def assign(
    do: Do,
    step: int,
    found: Ref,
    config: RunConfig,
    batch: int,
    earlier: Sequence[Ref],
    groups: Mapping[str, int] | None = None,
) -> Ref:
    """Say which examples a batch of a step tries.

    `groups` is how many of which environment, and then `earlier` the assignments of the step so far; else it is the
    work that was drawn before, which only a sampler with state looks at.
    """
    again = {"batch": str(batch)} if batch else {}
    again |= {"groups": json.dumps(groups, sort_keys=True)} if groups else {}
    refs = (found, *earlier) if groups or config.assignment.sampler.stateful else (found,)
    return do(assignment.task, step, refs, services={"batch": batch, "groups": groups}, extra_inputs=again)


def _sampled(do: Do, step: int, assigned: Ref, found: Ref, policy: Policy, config: RunConfig) -> Ref:
    if config.kind == "sft":
        return do(demonstration.task, step, (assigned, found))
    return do(rollout.task, step, (assigned, found), sampler(policy, config))


def sampler(policy: Policy | None, config: RunConfig) -> Policy | None:
    """Return the policy that rollouts depend on: none where teachers sample all of them."""
    return None if only_teachers_sample(config) else policy


def _judged(
    do: Do, step: int, policy: Policy, config: RunConfig, before: Ref | None, traces: tuple[Ref, ...]
) -> tuple[Ref, Ref]:
    verdicts = do(filtering.task, step, traces)
    return verdicts, credit(do, step, traces, verdicts, config, before, policy)


def credit(
    do: Do,
    step: int,
    traces: tuple[Ref, ...],
    verdicts: Ref,
    config: RunConfig,
    before: Ref | None,
    sampled_by: Policy | None = None,
) -> Ref:
    """Credit a step's kept rollouts, scored by a reference first where an algorithm has one.

    `before` is the same of the step before, where an estimator has state; `sampled_by` the policy that sampled them,
    which scores them itself where an algorithm wants that.
    """
    policy = sampled_by if scored_by_policy(config) else None
    scored = (do(reference.task, step, (*traces, verdicts), policy),) if config.scorers else ()
    states = (before,) if before and config.stateful else ()
    return do(advantage.task, step, (*traces, verdicts, *scored, *states))

"""What must hold of the sections that say which examples a step tries: sampler, oversampling, refill, admission."""

from collections.abc import Iterable, Iterator

from configs.algorithms import AlgorithmConfig, GroupSection
from configs.replay import replayed_stages
from configs.run import RunConfig


def assignment_problems(config: RunConfig, algorithms: Iterable[tuple[str, AlgorithmConfig]]) -> Iterator[str]:
    """Yield one line for each thing that cannot work; `algorithms` come with where the config names them."""
    assignment, admission = config.assignment, config.admission
    if assignment.refill and config.kind == "sft":
        yield "assignment.refill: demonstrations are what they are; a run of kind sft has no groups to replace"
    if assignment.refill and config.filtering.max_batch_attempts < 2:
        yield (
            "assignment.refill: filtering.max_batch_attempts is 1, which leaves no second batch to replace groups; "
            "give it 2 or more"
        )
    if assignment.sampler.stateful and config.kind == "sft":
        yield (
            f"assignment.sampler: {assignment.sampler.type} goes by rewards, and demonstrations earn none; a run of "
            "kind sft needs 'standard'"
        )
    if assignment.sampler.stateful and not assignment.shuffle:
        yield f"assignment.shuffle: {assignment.sampler.type} draws at random; dataset order needs sampler 'standard'"
    if assignment.oversampling > 1 and _filters_rollouts(config) and not _drops_incomplete(config):
        yield (
            f"assignment.oversampling: {assignment.oversampling:g} begins more groups than are trained on, and what "
            "has ended of a stopped group are its short rollouts: a baseline of those rewards being short. Add "
            '{ type = "incomplete_group" }, enforced, to filtering.filters'
        )
    if admission is not None and admission.reject_min > admission.reject_max:
        yield (
            f"admission: the range from {admission.reject_min} to {admission.reject_max} is empty, so it refuses "
            "nothing; swap the two, or leave the section out"
        )
    if assignment.refill and _builds_batches(config):
        yield from _refill_problems(config, algorithms)


def _drops_incomplete(config: RunConfig) -> bool:
    return any(each.type == "incomplete_group" and each.enforce for each in config.filtering.filters)


def _filters_rollouts(config: RunConfig) -> bool:
    return config.kind == "train" or (config.kind == "replay" and "filtering" in replayed_stages(config.replay))


def _builds_batches(config: RunConfig) -> bool:
    return config.kind == "train" or (
        config.kind == "replay" and {"assignment", "advantage"} <= {*replayed_stages(config.replay)}
    )


def _refill_problems(config: RunConfig, algorithms: Iterable[tuple[str, AlgorithmConfig]]) -> Iterator[str]:
    """Yield a line for each algorithm whose groups without signal would be trained on and never replaced."""
    gate = config.admission
    if gate is not None and gate.reject_min <= 0 <= gate.reject_max:
        return
    filtered = any(each.type == "zero_advantage" and each.enforce for each in config.filtering.filters)
    for where, algorithm in algorithms:
        shaped = isinstance(algorithm, GroupSection) and algorithm.shaped
        if algorithm.compares_group and (shaped or not filtered):
            why = (
                "rewards are shaped, which zero_advantage does not see" if shaped else "zero_advantage is not enforced"
            )
            yield (
                f"assignment.refill: groups whose advantages are all zero would not be replaced ({where}: {why}); set "
                "admission={}, a gate that refuses them"
            )

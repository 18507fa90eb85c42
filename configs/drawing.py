"""What must hold of the sections that say how a step is drawn: its examples, its replacements, its gate."""

from collections.abc import Iterator

from configs.run import RunConfig


def drawing_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing that cannot work."""
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
    if admission is not None and admission.reject_min > admission.reject_max:
        yield (
            f"admission: the range from {admission.reject_min} to {admission.reject_max} is empty, so it refuses "
            "nothing; swap the two, or leave the section out"
        )

"""What must hold of references and teachers in a config, whatever the machine."""

from collections.abc import Iterable, Iterator

from configs.algorithms import AlgorithmConfig, OpsdConfig, TeacherConfig
from configs.replay import replayed_stages
from configs.run import RunConfig, for_environment

PLACE = "{demonstration}"


def needs_reference_scores(config: RunConfig) -> bool:
    """Tell whether a run has rollouts scored by a reference: of a replay, whether it does so again."""
    does = config.kind == "train" or (config.kind == "replay" and "advantage" in replayed_stages(config.replay))
    return does and bool(config.scorers)


def policy_scores(config: RunConfig) -> bool:
    """Tell whether the policy that sampled rollouts scores some of them itself."""
    return any(each is not None and each.scored_by == "policy" for each in config.scorers.values())


def only_teachers_sample(config: RunConfig) -> bool:
    """Tell whether no environment's rollouts are sampled by the policy, so that they do not depend on it."""
    return bool(config.teachers) and all(
        for_environment(config.teachers, each.name) is not None for each in config.environments
    )


def teacher_of(algorithm: AlgorithmConfig) -> TeacherConfig | None:
    """Return the teacher of an algorithm; None where it has none."""
    teacher: TeacherConfig | None = getattr(algorithm, "teacher", None)
    return teacher


def teacher_problems(config: RunConfig, algorithms: Iterable[tuple[str, AlgorithmConfig]]) -> Iterator[str]:
    """Yield one line for each thing that cannot work of `algorithms`, given with where the config names them."""
    if config.kind in ("evaluate", "sft"):  # neither scores nor samples with a teacher
        return
    for where, algorithm in algorithms:
        teacher = teacher_of(algorithm)
        if teacher is not None and bool(teacher.path) == bool(teacher.url):
            said = "both are set" if teacher.path else "neither is set"
            yield f"{where}.teacher: give the path of its weights, or the url of an engine that serves it; {said}"
        if isinstance(algorithm, OpsdConfig) and PLACE not in algorithm.template:
            yield f"{where}.template: it shows no demonstration; put {PLACE} where it belongs"
        if algorithm.scored_by:
            yield from _temperature_problems(config, where, algorithm)


def _temperature_problems(config: RunConfig, where: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    why = (
        f"{algorithm.type} compares with log-probs of the reference, which engines give a prompt at temperature 1 and "
        "over the whole vocabulary only; it needs 1"
    )
    if config.rollout.top_p != 1:
        yield f"rollout.top_p: {config.rollout.top_p:g}: {why}"
    concerned = {
        index: each
        for index, each in enumerate(config.environments)
        if where == (f"environments.{index}.algorithm" if each.algorithm else "algorithm")
    }
    if any(each.temperature is None for each in concerned.values()) and config.rollout.temperature != 1:
        yield f"rollout.temperature: {config.rollout.temperature:g}: {why}"
    for index, each in concerned.items():
        if each.temperature not in (None, 1.0):
            yield f"environments.{index}.temperature: {each.temperature:g}: {why}"
        for name, seat in each.seats.items():
            if seat.trainable and seat.model is None and seat.temperature not in (None, 1.0):
                yield f"environments.{index}.seats.{name}.temperature: {seat.temperature:g}: {why}"

"""What must hold of evaluations in a config, whatever the machine."""

from collections import Counter
from collections.abc import Iterator

from configs.evaluation import EvaluationConfig
from configs.run import RunConfig


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing about the evaluations of a run that cannot work."""
    names = Counter(each.name for each in config.evaluation.sets)
    for name, count in names.items():
        if count > 1:
            yield f"evaluation.sets: {count} of them are named {name!r}; tables and notes tell them apart by name"
    places = [f"evaluation.sets.{index}" for index in range(len(config.evaluation.sets))] or ["evaluation"]
    for where, chosen in zip(places, config.evaluation.of_sets().values(), strict=False):
        yield from _set_problems(config, where, chosen)
    yield from _external_problems(config)


def _set_problems(config: RunConfig, where: str, chosen: EvaluationConfig) -> Iterator[str]:
    for k in chosen.pass_at:
        if not 1 <= k <= chosen.attempts:
            yield f"{where}.pass_at: pass@{k} needs k from 1 to {where}.attempts, which is {chosen.attempts}"
    known = {each.name: each for each in config.environments}
    for name in chosen.environments:
        if name not in known:
            yield f"{where}.environments: the run has no environment {name!r}; it has {', '.join(known) or 'none'}"
    for name in chosen.environments or known:
        if name in known and not known[name].holdout_fraction and (config.kind == "evaluate" or chosen.every):
            yield f"{where}: environment {name!r} holds out nothing to evaluate on; set its holdout_fraction above 0"
    for field, values in chosen.where.items():
        if not values:
            yield f"{where}.where.{field}: no value is wanted, so no example would be tried"


def _external_problems(config: RunConfig) -> Iterator[str]:
    external = config.evaluation.external
    if external is None:
        return
    if config.kind != "evaluate":
        yield (
            f"evaluation.external: a run of kind {config.kind} has policies of its own; someone else's model is only "
            "ever evaluated (stagecoach eval), never trained on"
        )
    for index, each in enumerate(config.environments):
        if any(seat.model for seat in each.seats.values()):
            yield (
                f"environments.{index}.seats: frozen models of seats play beside policies of ours, whose tokenizer "
                "they share; an evaluation of evaluation.external has no such model"
            )
    if config.evaluation.policy:
        yield "evaluation.policy: evaluation.external is tried in place of a policy; name one of the two"
    if not external.url.startswith(("http://", "https://")) or not external.model:
        yield "evaluation.external: give the url of a chat API (https://host/v1), and the name of a model there"

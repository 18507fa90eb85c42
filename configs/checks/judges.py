"""What is wrong with the judges of a config, and with what they stand beside."""

import re
from collections import Counter
from collections.abc import Iterator

from configs.checks.algorithms import chat_problems
from configs.environments import EnvironmentConfig
from configs.errors import did_you_mean
from configs.judges import PLACEHOLDERS, JudgeConfig, ParserConfig, judges_inside
from configs.run import RunConfig


def judge_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing that cannot work."""
    if config.judges and config.from_data:
        yield f"judges: a run of kind {config.kind} trains on what it is given, and judges nothing; leave them out"
    if config.judges and config.streams and config.assignment.sampler.stateful:
        yield (
            "judges: with rollout.max_off_policy_steps above 1 a sampler that learns from rewards sees them before "
            "they are judged; take assignment.sampler.type=standard, or rollout.max_off_policy_steps of at most 1"
        )
    for name, number in Counter(judge.name for judge in config.judges).items():
        if number > 1:
            yield f"judges: {number} of them are called {name!r}; give each a name of its own"
    for where, environment in config.served_environments.items():
        yield from _problems_inside(config, where, environment)
    for index, judge in enumerate(config.judges):
        yield from _problems(config, f"judges.{index}", judge)


def _problems_inside(config: RunConfig, where: str, environment: EnvironmentConfig) -> Iterator[str]:
    names, known = judges_inside(environment), [judge.name for judge in config.judges]
    for name in names:
        if name not in known:
            yield f"{where}: there is no judge {name!r} in the run{did_you_mean(name, known)}"
    if names and (environment.addresses or config.placement.services == "pools"):
        yield f"{where}: judges of the run answer on its machine, its servers run elsewhere; give base_url a URL"


def _problems(config: RunConfig, where: str, judge: JudgeConfig) -> Iterator[str]:
    if bool(judge.url) == bool(judge.path):
        yield f"{where}: give the url of a chat API and the name of a model there, or the path of weights, one of both"
    elif judge.chat:
        yield from chat_problems(where, judge.chat)
    names = re.findall(r"\{(\w+)\}", judge.prompt)
    for name in sorted({*names} - {*PLACEHOLDERS}):
        hint = did_you_mean(name, PLACEHOLDERS)
        yield f"{where}.prompt: {{{name}}} is nothing that it can show{hint}; it can show {', '.join(PLACEHOLDERS)}"
    if not {"response", "transcript"} & {*names}:
        yield f"{where}.prompt: it shows no part of a rollout; put {{response}} or {{transcript}} into it"
    known = [environment.name for environment in config.environments]
    for name in judge.environments:
        if name not in known:
            yield f"{where}.environments: there is no environment {name!r}{did_you_mean(name, known)}"
    if taken := sorted({"model", "messages", "stream", "n"} & {*judge.sampling}):
        yield f"{where}.sampling: {', '.join(taken)} is said elsewhere; leave it out"
    if judge.budget.max_cost and not (judge.input_price or judge.output_price):
        yield f"{where}.budget.max_cost: without input_price and output_price nothing costs money"
    yield from _parser_problems(f"{where}.parser", judge.parser)


def _parser_problems(where: str, parser: ParserConfig) -> Iterator[str]:
    if parser.minimum >= parser.maximum:
        yield f"{where}: minimum {parser.minimum:g} is not below maximum {parser.maximum:g}"
    if parser.type == "pattern":
        try:
            groups = re.compile(parser.pattern).groups
        except re.error as error:
            yield f"{where}.pattern: {parser.pattern!r} is no regular expression: {error}"
            return
        if groups != 1:
            yield f"{where}.pattern: {parser.pattern!r} has {groups} groups; one group is the score"
    outside = [word for word, score in parser.choices.items() if not parser.minimum <= score <= parser.maximum]
    if parser.type == "choice" and (outside or not parser.choices):
        bounds = f"{parser.minimum:g} to {parser.maximum:g}"
        yield f"{where}.choices: {', '.join(outside) or 'none'}: give scores from {bounds}"

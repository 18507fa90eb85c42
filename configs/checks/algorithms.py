"""What must hold of the algorithms in a config, whatever the machine and whatever is sampled."""

import re
from collections.abc import Iterable, Iterator

from configs.algorithms import AlgorithmConfig, EchoConfig, RaeConfig
from configs.functions import imported_functions
from configs.replay import replayed_stages
from configs.run import RunConfig

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def algorithm_problems(config: RunConfig, algorithms: Iterable[tuple[str, AlgorithmConfig]]) -> Iterator[str]:
    """Yield one line for each thing that cannot work of `algorithms`, given with where the config names them."""
    again = config.kind == "replay" and "advantage" in replayed_stages(config.replay)
    if config.kind != "train" and not again:
        return
    for where, algorithm in algorithms:
        if algorithm.compares_group and config.assignment.group_size == 1:
            yield (
                f"assignment.group_size: {algorithm.type} compares the rollouts of a group; with 1 there is nothing to "
                f"compare ({where})"
            )
        if isinstance(algorithm, RaeConfig) and algorithm.order == "post" and not algorithm.decay:
            yield f"{where}.decay: at 0, order 'post' subtracts the reward itself, so that every advantage is zero"
        if isinstance(algorithm, EchoConfig):
            yield from _echo(where, algorithm)
        for each in imported_functions(algorithm, f"{where}."):
            if not IMPORT_PATH.fullmatch(each.path):
                yield f"{each.key}: {each.path!r} is no import path; write it as package.module:function"


def _echo(where: str, algorithm: EchoConfig) -> Iterator[str]:
    if not (algorithm.system or algorithm.user or algorithm.tool):
        yield f"{where}: without a role (tool, user, system) echo adds nothing to grpo; name one, or choose grpo"
    for role, section in (("system", algorithm.system), ("user", algorithm.user)):
        if section is not None and section.tool_names is not None:
            yield f"{where}.{role}.tool_names: only results of tools have a tool's name; leave it out"
    if algorithm.tool is not None and algorithm.tool.tool_names == ():
        yield f"{where}.tool.tool_names: it names no tool; null is every tool, and {where}.tool=null is none"
    if algorithm.arguments and not algorithm.keep_mask:
        yield f"{where}.arguments: there is no keep_mask that would be given them"

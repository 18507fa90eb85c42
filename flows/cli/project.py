"""The files of a project: of somebody's own data, for an installed environment, or out of another trainer's config."""

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.toml_text import toml

CONFIG, REWARD, EXAMPLES = "config.toml", "my_reward.py", "examples.jsonl"
NUM_EXAMPLES = 500
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEED = 17
LARGE = {"max_tokens": 256, "max_model_len": 2048, "every": 0}
"""Sizes of a config for tasks that are not the sample; how many examples can be held out is not known."""

TEMPLATE = """\
# A run {about}: `stagecoach run config.toml`. `stagecoach config KEY` says what a setting means.
steps = 20

[model]
# The starting weights. `demo` is a small model that the first run makes and warms up on this machine: it can reverse
# short words and nothing else. For your own task name a directory or a model of the hub, such as "Qwen/Qwen3-0.6B".
path = "demo"
# The chat format. For a model of the hub that is known, leave out both lines.
renderer = "qwen3"
renderer_settings = {{ enable_thinking = false }}   # no thoughts before the answer: as the small model was warmed up

[[environments]]
{environment}
[assignment]
groups_per_step = 8                 # examples of a step
group_size = 16                     # rollouts of each example, which are compared with each other

[rollout]
max_tokens = {max_tokens:<22} # of one reply, the longest

[engine]
max_model_len = {max_model_len:<19} # prompt and reply together, in tokens

[packing]
tokens_per_row = 2048               # of the learner; at least max_model_len
{algorithm}
[training]
learning_rate = 3e-4                # for the small model; a model of a billion weights wants about 1e-6

[evaluation]
every = {every:<27} # steps between evaluations; 0 is never
num_examples = 32                   # of those that are held out, a tenth of all
"""
OWN_DATA = """\
name = "my_data"
max_turns = 1                       # the model answers once

[environments.taskset]
id = "own_data"                     # each row is a task: a prompt, and an answer to compare the reply with
{data}
task = {{ scoring = "my_reward:reward" }}   # or "exact", "contains", "number"
# Several rewards, each with a figure of its own, in place of `task`:
# task.scoring.right = {{ function = "my_reward:reward" }}
# task.scoring.short = {{ function = "my_reward:short", weight = 0.2 }}

# A function that sees all rollouts of a group: see docs/extending.md.
# [environments.group_rewards.best]
# function = "my_reward:best"
# weight = 0.5
"""
REWARD_FUNCTION = '''\
"""What a reply is worth. The run calls `reward` for every reply; it learns to get more of what this returns."""

import re
from difflib import SequenceMatcher


def reward(reply: str, answer: str, row: dict) -> float:
    """Return how much of the answer stands between <rev> and </rev>, from 0 to 1. `row` is the line of the example."""
    found = re.search("<rev>(.*?)</rev>", reply, re.DOTALL)
    return SequenceMatcher(None, found[1].strip(), answer).ratio() if found else 0.0
'''


class ProjectRefused(ValueError):
    """A project cannot be written where it was asked for, or out of what it was asked for."""


PLAIN_REWARD = '''

def {name}(reply: str, answer: str, row: dict) -> float:
    """Return 1 where the answer stands in the reply, else 0. `row` has all columns of the example."""
    return float(answer.strip().casefold() in reply.casefold())
'''


def rewards(names: Iterable[str]) -> str:
    """Return a file with a plain reward function of each name."""
    head = (
        '"""What a reply is worth. The run calls this for every reply; it learns to get more of what it returns."""\n'
    )
    return head + "".join(PLAIN_REWARD.format(name=name) for name in names)


def example_rows() -> Iterator[dict[str, str]]:
    """Yield the sample's examples: short texts to reverse, in the words that the demo's model knows."""
    draw = random.Random(SEED)
    texts: dict[str, None] = {}
    while len(texts) < NUM_EXAMPLES:
        texts["".join(draw.choices(LETTERS, k=draw.randint(3, 5)))] = None
    for text in texts:
        yield {"prompt": f"Reverse inside <rev>: {text}", "answer": text[::-1]}


def data_files() -> dict[str, str]:
    """Return reward function and examples of a project of own data, by name."""
    return {REWARD: REWARD_FUNCTION, EXAMPLES: "".join(f"{json.dumps(row)}\n" for row in example_rows())}


def own_data(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a project of own data, by name; without settings of its taskset the data is the sample."""
    data = "\n".join(f"{name} = {toml(value)}" for name, value in (settings or {"path": EXAMPLES}).items())
    sizes = LARGE if settings else {"max_tokens": 40, "max_model_len": 256, "every": 10}
    text = TEMPLATE.format(about="on data of your own", environment=OWN_DATA.format(data=data), algorithm="", **sizes)
    return {CONFIG: text} | ({REWARD: rewards(["reward"])} if settings else data_files())


def for_environment(name: str) -> dict[str, str]:
    """Return the config of a project for an installed environment."""
    lines = [
        f"name = {toml(name.rsplit('/', 1)[-1].partition('@')[0].replace('-', '_'))}",
        "",
        "[environments.taskset]              # `stagecoach check config.toml --load` lists its settings and seats",
        f"id = {toml(name)}",
        "",
    ]
    algorithm = (
        '\n# [algorithm]\n# type = "rae"                      # for several trained seats: a baseline for each\n'
    )
    about = f"in the environment {name}"
    return {CONFIG: TEMPLATE.format(about=about, environment="\n".join(lines), algorithm=algorithm, **LARGE)}


def of_settings(
    settings: Mapping[str, Any],
    lists: Mapping[str, Sequence[Mapping[str, Any]]],
    origins: Mapping[str, str],
    head: str,
) -> str:
    """Return a config with a line for each setting by dotted key, with the keys that it came from, and with lists."""
    lines = [f"# {head}"]
    for key, value in settings.items():
        written, origin = f"{key} = {toml(value)}", origins[key]
        lines.append(f"{written:<50} # {origin}" if origin.isprintable() and len(origin) < 100 else written)
    for name, tables in lists.items():
        for table in tables:
            lines += ["", f"[[{name}]]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of a project, none of which may be there. Raises ProjectRefused, and nothing is written."""
    if existing := [name for name in files if os.path.lexists(directory / name)]:
        raise ProjectRefused(
            f"{directory} has {', '.join(existing)} already, and files are never overwritten; nothing was written. "
            "Name another directory, or move what is there"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ProjectRefused(f"{directory}: cannot be written: {error.strerror}") from error

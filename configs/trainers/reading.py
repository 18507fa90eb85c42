"""Reads configs of other trainers: TOML, YAML or JSON files, command lines, and scripts, none of which is ever run."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import ConfigError
from configs.trainers import prime_rl, trl
from configs.trainers.translation import ForeignTrainer, flat, matches, names

COMPONENTS = ("orchestrator", "trainer", "inference")
TABLES: Mapping[str, frozenset[str]] = {
    "orchestrator": frozenset(names("train env sampling algo advantage buffer eval")),
    "trainer": frozenset(names("optim scheduler loss data")),
    "inference": frozenset(names("vllm server parallel router")),
}
"""Tables by which a file of prime-rl for one component alone is known."""
ORCHESTRATOR = frozenset(names("batch_size token_batch_size group_size rollouts_per_example max_off_policy_steps"))
"""Plain keys that an orchestrator's file has, and TRL has not."""
CALLS: Mapping[str, Mapping[str, str]] = {
    "GRPOTrainer": {
        "model": "model_name_or_path",
        "reward_funcs": "reward_funcs",
        "tools": "tools",
        "environment_factory": "environment_factory",
    },
    "LoraConfig": {
        "r": "lora_r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "target_modules": "lora_target_modules",
        "target_parameters": "lora_target_parameters",
        "modules_to_save": "lora_modules_to_save",
        "task_type": "lora_task_type",
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
    },
    "load_dataset": {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"},
}
"""Calls in a script beside GRPOConfig, and the names that their arguments have in a file for TRL's own script."""
MAX_CHARS = 10_000_000
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class ForeignConfig(NamedTuple):
    """A config of another trainer."""

    trainer: ForeignTrainer
    keys: dict[str, Any]
    """Values by dotted key."""
    unread: list[str]
    """Arguments whose value is no literal, with the reason that they could not be read."""


def read_foreign(files: Sequence[str]) -> ForeignConfig:
    """Return what files of one trainer say together, later ones over earlier ones.

    Raises ConfigError for a file that cannot be read, whose keys are no trainer's that is known here, or that is of
    another trainer than the others.
    """
    read = [_read(Path(file)) for file in files]
    if len({each.trainer.name for each in read}) > 1:
        origins = ", ".join(f"{file} of {each.trainer.name}" for file, each in zip(files, read, strict=True))
        raise ConfigError([f"--from: the files are of different trainers: {origins}; give those of one"])
    keys = {key: value for each in read for key, value in each.keys.items()}
    if keys and all(key.startswith("inference.") for key in keys):
        raise ConfigError(
            [f"{', '.join(files)}: serves a model and trains none; give the file of the orchestrator as well"]
        )
    return ForeignConfig(read[0].trainer, keys, [line for each in read for line in each.unread])


def _read(path: Path) -> ForeignConfig:
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    if len(text) > MAX_CHARS:
        raise ConfigError([f"{path}: is longer than {MAX_CHARS:,} characters, so it is no config; nothing was written"])
    if path.suffix in (".py", ".ipynb"):
        return ForeignConfig(trl.TRAINER, *_script(path, _cells(path, text) if path.suffix == ".ipynb" else text))
    if path.suffix == ".sh":
        return ForeignConfig(trl.TRAINER, _command(path, text), [])
    tree = _tables(path, text)
    _refuse_other_programs(path, tree)
    if component := _component(tree):
        return ForeignConfig(prime_rl.TRAINER, _prime_rl(component, tree), [])
    keys = {key: _number(value) for key, value in tree.items()}
    if not any(matches(key, old) for key in keys for old in trl.TRAINER.known):
        raise ConfigError(
            [
                f"{path}: its keys are neither prime-rl's ([orchestrator], [trainer], [inference]) nor arguments of "
                f"TRL's "
                f"GRPOConfig; they are {', '.join(list(tree)[:8]) or 'none'}"
            ]
        )
    return ForeignConfig(trl.TRAINER, keys, [])


def _refuse_other_programs(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse configs of prime-rl's programs that do no reinforcement learning. Raises ConfigError."""
    data, keys = tree.get("data"), set(tree)
    whole = any(isinstance(tree.get(name), dict) for name in ("orchestrator", "trainer"))
    if isinstance(data, dict) and "fake" not in data and not whole:
        raise ConfigError(
            [
                f"{path}: a config of prime-rl for supervised training. `--from` reads those of reinforcement "
                "learning: write one for `stagecoach sft` by hand, after the preset sft_demo"
            ]
        )
    if isinstance(tree.get("eval"), dict) and not whole and not keys & (ORCHESTRATOR | {"train", "env", "max_steps"}):
        raise ConfigError(
            [
                f"{path}: a config of prime-rl for evaluations. `--from` reads those of reinforcement learning: name "
                "its environments in a config of your own for `stagecoach eval`"
            ]
        )


def _tables(path: Path, text: str) -> dict[str, Any]:
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            tree = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            tree = yaml.safe_load(text)
        else:
            raise ConfigError([f"{path}: want a file that ends in .toml, .yaml, .json, .py, .ipynb or .sh"])
    except ConfigError:
        raise
    except Exception as error:  # whatever a parser raises, RecursionError among it
        raise ConfigError([f"{path}: not {path.suffix[1:].upper()}: {error}"]) from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError([f"{path}: names with values are wanted, this is {type(tree).__name__}"])
    return tree


def _component(tree: Mapping[str, Any]) -> str:
    """Return the part of prime-rl that a file is for, `rl` for all; empty where it is not prime-rl's."""
    if any(isinstance(tree.get(name), dict) for name in COMPONENTS):
        return "rl"
    tables = {name for name, value in tree.items() if isinstance(value, dict | list)}
    hits = {name: len(TABLES[name] & tables) for name in COMPONENTS}
    hits["orchestrator"] += len(ORCHESTRATOR & set(tree))
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else ""


def _prime_rl(component: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "" if component == "rl" else f"{component}."
    # An empty table of a component says that it is there, as it always is.
    return {key: value for key, value in flat(tree, prefix) if key not in COMPONENTS}


def _number(value: Any) -> Any:
    """Return a text such as 1e-6 as the number that it is: YAML takes one without a dot for text."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _command(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of the one command in a file that runs a script, or TRL's own."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([f"{path}: not a command line: {error}"]) from error
    # What stands before the script is of the program that starts it.
    begins = [at for at, word in enumerate(words) if word.endswith(".py") or words[at - 1 : at + 1] == ["trl", "grpo"]]
    if len(begins) != 1:
        raise ConfigError([f"{path}: want one command that runs a script, or `trl grpo`; this has {len(begins)}"])
    given: dict[str, list[Any]] = {}
    name = ""
    for word in words[begins[0] + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [_literal(value)] if equals else []
        elif name:
            given[name].append(_literal(word.rstrip(",")))
    keys = {key: values[0] if len(values) == 1 else values or True for key, values in given.items()}
    if any(key.startswith("lora_") for key in keys):
        keys.setdefault("use_peft", False)  # without it TRL's own scripts take no notice of them
    return keys


def _literal(word: str) -> Any:
    """Return a word of a command line as the number or truth that it is, else as it stands."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(word, word))
    except (ValueError, SyntaxError):
        return word


def _cells(path: Path, text: str) -> str:
    """Return the code of a notebook; lines for its shell are left out."""
    try:
        cells = [each for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
        lines = [line for each in cells for line in "".join(each["source"]).splitlines()]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError([f"{path}: not a notebook: {error}"]) from error
    return "\n".join(
        f"{line[: -len(line.lstrip())]}pass" if line.lstrip()[:1] in ("!", "%") else line for line in lines
    )


def _script(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of GRPOConfig and of the calls around it in a script, and those that are no literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not Python: {error}"]) from error
    calls = [(_name(node), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [node for name, node in calls if name == "GRPOConfig"]
    if len(configs) != 1:
        lines = f" (lines {', '.join(str(node.lineno) for node in configs)})" if configs else ""
        raise ConfigError(
            [
                f"{path}: want one call of GRPOConfig(...), this has {len(configs)}{lines}. A script that takes its "
                "arguments from the command line has them in a YAML file, or in the command: give that, as .sh"
            ]
        )
    constants = {**dict(_constants(tree)), **dict(_argument_defaults(calls))}
    keys: dict[str, Any] = {}
    unread: list[str] = []
    for name, node in calls:
        wanted = CALLS.get(name)
        if node in configs or wanted is not None:
            for argument, value in _arguments(name, node):
                if wanted is None or argument in wanted:
                    key = argument if wanted is None else wanted[argument]
                    _keep(keys, unread, key, value, constants)
    return keys, unread


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names that are given a literal at the top of a script, or in its `main`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except ValueError:
                continue


def _argument_defaults(calls: Sequence[tuple[str, ast.Call]]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the script's own command line that have a literal for a default, as `args.NAME`."""
    for name, call in calls:
        last = call.args[-1] if name == "add_argument" and call.args else None
        flag = last.value if isinstance(last, ast.Constant) else None
        for keyword in call.keywords if isinstance(flag, str) else ():
            if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                yield f"args.{str(flag).lstrip('-').replace('-', '_')}", keyword.value.value


def _arguments(name: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if name == "load_dataset":
        yield from zip(("path", "name"), call.args, strict=False)
    for keyword in call.keywords:
        yield keyword.arg or "**", keyword.value


def _keep(keys: dict[str, Any], unread: list[str], key: str, value: ast.expr, constants: Mapping[str, Any]) -> None:
    if isinstance(value, ast.Name | ast.Attribute) and (named := ast.unparse(value)) in constants:
        keys[key] = constants[named]
        return
    if key in ("reward_funcs", "tools", "environment_factory"):  # functions: their names say which
        keys[key] = ast.unparse(value)
        return
    try:
        keys[key] = ast.literal_eval(value)
    except ValueError:
        unread.append(f"{key}: `{ast.unparse(value)[:60]}` is no literal, and the script is not run: set it by hand")

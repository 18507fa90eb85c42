"""Makes a large store to look at: `python -m benchmarks.viewing_store ROOT [--steps 200] [--rollouts 512] ...`.

It holds a run as training leaves it: walked by the real pipeline, filtered, credited and packed by the real stages, in
parts like a sampled one. Rollouts and what a learner would measure are made up. The same arguments make the same rows.
Beside it there may be a fork that samples and trains the last steps again with another learning rate, and one that
credits some of them with another algorithm.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rehearsed.shapes import TEXT_ENVIRONMENT, TOOL_ENVIRONMENT, Shape, tools
from benchmarks.rehearsed.walking import replay, walk
from benchmarks.rehearsed.wording import RARE, VOCABULARY
from configs.run import RunConfig
from storage.maintenance.compact import maintain
from storage.store import Store, open_store
from tasks.runtime import execute as parts

RUN, FORK, CREDITED = "large", "large-again", "large-rloo"
FILTERS: tuple[Mapping[str, Any], ...] = (
    {"type": "errored"},
    {"type": "truncated", "enforce": True},
    {"type": "zero_advantage"},
    {"type": "gibberish", "token_id_threshold": RARE},
    {"type": "repetition", "enforce": True, "window": 10},
    {"type": "parse_error", "enforce": True},
)


def main() -> None:
    """Make a store as the arguments say, a small one to throw away without any; print how long it took."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("root", type=Path, nargs="?", default=None)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--rollouts", type=int, default=512, help="rollouts of a step")
    options.add_argument("--group-size", type=int, default=16)
    options.add_argument("--fork", type=int, default=None, help="the step from which on the forks differ")
    options.add_argument("--messages", type=int, default=None, help="messages of every rollout; without it 3 to 8")
    options.add_argument("--maintain-every", type=int, default=None, help="keep house after so many steps")
    options.add_argument("--seed", type=int, default=7)
    given = options.parse_args()
    if given.root is not None:
        _timed(**vars(given))
        return
    with tempfile.TemporaryDirectory() as directory:
        _timed(Path(directory) / "store", steps=10)


def _timed(root: Path, **given: Any) -> None:
    began = time.perf_counter()
    store = make(root, **given)
    files = {name: len(store.table(name).active_files()) for name in store.root.names("tables")}
    print(f"{root}: {time.perf_counter() - began:.0f} s; files by table: {files}")


def make(
    root: Path,
    steps: int = 200,
    rollouts: int = 512,
    group_size: int = 16,
    fork: int | None = None,
    messages: int | None = None,
    maintain_every: int | None = None,
    seed: int = 7,
) -> Store:
    """Make the store at `root`; return it.

    `rollouts` of a step are cut into groups of `group_size`. From step `fork` on there are two more runs: one that
    sampled and trained again with a third of the learning rate, one that credited the same rollouts with rloo. With
    `messages` every rollout has so many; a call of a tool and its result alternate.
    """
    shape = None if messages is None else _of_length(messages)
    config = settings(root, steps, rollouts, group_size, seed, messages)
    with without_rest():
        for step in walk(config, shape):
            if maintain_every and (step + 1) % maintain_every == 0:
                maintain(open_store(root))
        for forked in _forks(config, fork) if fork is not None else ():
            for _ in replay(forked):
                pass
    return open_store(root)


def settings(
    root: Path, steps: int, rollouts: int, group_size: int, seed: int = 7, messages: int | None = None
) -> RunConfig:
    """Return the config of the run."""
    environments = [
        {"name": TOOL_ENVIRONMENT, "taskset": {"id": TOOL_ENVIRONMENT}, "algorithm": {"type": "echo"}, "max_turns": 8},
        {"name": TEXT_ENVIRONMENT, "taskset": {"id": TEXT_ENVIRONMENT}},
    ]
    return RunConfig.model_validate(
        {
            "name": RUN,
            "store": str(root),
            "seed": seed,
            "steps": steps,
            "environments": environments[:1] if messages else environments,
            "assignment": {"groups_per_step": rollouts // group_size, "group_size": group_size},
            "rollout": {"max_off_policy_steps": 1, "max_tokens": 96},
            "filtering": {"filters": FILTERS},
            "packing": {"tokens_per_row": 8192 if messages is None else max(8192, 64 * messages)},
            "training": {"learning_rate": 3e-4},
            "model": {"vocab_size": VOCABULARY, "renderer": "qwen3", "path": "rehearsed-0.6B"},
            "evaluation": {"num_examples": min(32, rollouts // 16 + 1), "every": 50},
        }
    )


@contextmanager
def without_rest() -> Iterator[None]:
    """Commit parts one right after the other: sampling would take the time between them, and there is none."""
    rest, parts.PAUSE_RATIO = parts.PAUSE_RATIO, 0.0
    try:
        yield
    finally:
        parts.PAUSE_RATIO = rest


def _forks(config: RunConfig, first: int) -> list[RunConfig]:
    slower = _again(config, FORK, first, "rollout", "training", {"training": {"learning_rate": 1e-4}})
    return [slower, _again(config, CREDITED, first, "advantage", "packing", {"algorithm": {"type": "rloo"}})]


def _again(
    config: RunConfig, name: str, first: int, from_stage: str, until: str, changes: Mapping[str, Any]
) -> RunConfig:
    """Return the config of a replay of the run's steps from `first` on with changes."""
    whole = config.model_dump(mode="json")
    asked = {"run": config.name, "from_stage": from_stage, "until": until, "first_step": first}
    asked["last_step"] = config.steps
    changed = {section: {**whole[section], **fields} for section, fields in changes.items() if section != "algorithm"}
    changed |= {section: fields for section, fields in changes.items() if section == "algorithm"}
    own = {"name": name, "kind": "replay", "steps": config.steps - first, "replay": asked}
    return RunConfig.model_validate(whole | own | changed)


def _of_length(messages: int) -> Shape:
    """Return a rollout of at least so many messages: calls of a tool, one after the other."""
    return tools((messages - 2) // 2)


if __name__ == "__main__":
    main()

"""Credits a run's recorded rollouts by several algorithms, each in a replay of its own, side by side.

The rollouts, the verdicts and all before them are shared; only the advantage stage is done again, so that what differs
between two columns is the algorithm and nothing else.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.cli.launch import watch
from flows.queries.recorded_run import recorded_run
from flows.replays.config import prepare_replay
from flows.replays.request import ReplayRequest
from flows.runtime.prepare import find_policy
from storage.read.frames import Frames, existing_store
from tasks.advantage.algorithms.credit import AdvantageBreach

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"type": "grpo", "normalise_std": False},
    "grpo_std": {"type": "grpo", "normalise_std": True},
    "grpo_short": {"type": "grpo", "normalise_std": False, "length_penalty": {}},
    "dr_grpo": {"type": "dr_grpo"},
    "rloo": {"type": "rloo"},
    "max_rl": {"type": "max_rl"},
    "reinforce_pp": {"type": "reinforce_pp"},
    "hierarchical_grpo": {"type": "hierarchical_grpo"},
    "rae": {"type": "rae"},
    "echo": {"type": "echo"},
    "supervised": {"type": "supervised"},
    "opsd": {"type": "opsd"},
    "opd": {"type": "opd"},
}
"""What is tried, by the name that its column has. sft would sample anew, so it is not here."""
NEED_ENGINE = ("opsd", "opd")
"""opsd has to be told where the demonstration is, opd who the teacher is."""


@dataclass(frozen=True)
class Credited:
    """What one algorithm made of a run's rollouts."""

    name: str
    run: str
    """The replay that holds the credits; empty where the algorithm refused the rollouts."""
    refusal: str = ""
    """Why it refused them."""


def credit_all(
    run: str,
    names: Sequence[str] = (),
    steps: str = "",
    teacher: str = "",
    demonstration: str = "",
    store: str = "",
    plain: bool = False,
) -> tuple[Frames, str, list[Credited]]:
    """Credit a run's rollouts by each of the algorithms named, all that need no engine by default.

    `teacher` is a directory of weights, or RUN or RUN:VERSION of the store; with it opd is among the default ones, with
    `demonstration`, the field that holds one, opsd. Returns the store's tables, the run's name and what came of each.
    Raises ConfigError for an unknown run, algorithm or teacher; what an algorithm refuses is an answer.
    """
    root = existing_store(store or RunConfig().store)
    run, recorded = recorded_run(root, run)
    told: dict[str, dict[str, Any]] = {}
    if teacher:
        told["opd"] = {"teacher": {"path": _teacher(root, teacher)}}
    if demonstration:
        told["opsd"] = {"demonstration": demonstration}
    chosen = names or [name for name in VARIANTS if name not in NEED_ENGINE or name in told]
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise ConfigError([f"algorithms: {', '.join(unknown)}: the known ones are {', '.join(VARIANTS)}"])
    asked = [(name, asked_of(recorded, name, steps, told.get(name, {}), store)) for name in chosen]
    return Frames(root), run, [_credited(name, each, plain) for name, each in asked]


def _teacher(root: Any, teacher: str) -> str:
    if Path(teacher).expanduser().is_dir():
        return teacher
    policy = find_policy(root, teacher)
    assert policy is not None, "a policy that has a name is found or refused"
    return str(root.policies.directory(policy.key))


def asked_of(
    recorded: RunConfig, name: str, steps: str = "", told: Mapping[str, Any] | None = None, store: str = ""
) -> ReplayRequest:
    """Return what is asked of the replay that credits all rollouts of a run by one variant, and by nothing else.

    `told` are settings that the variant has to be told. Neither what the run set for that type stays, nor the algorithm
    that one of its environments has of its own.
    """
    settings = {**VARIANTS[name], **(told or {})}
    other = "grpo" if settings["type"] == "supervised" else "supervised"
    own = [number for number, each in enumerate(recorded.environments) if each.algorithm is not None]
    run = recorded.name
    return ReplayRequest(
        run,
        "advantage",
        "advantage",
        steps,
        [
            f"algorithm.type={other}",  # which forgets the settings of any
            f"algorithm={toml(settings)}",
            *(f"environments.{number}.algorithm=null" for number in own),
        ],
        name=f"{run}-by-{name}" + (f"-{steps.replace(':', '-')}" if steps else ""),
        store=store,
    )


def toml(value: Any) -> str:
    """Return plain values as TOML on one line, as an override takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _credited(name: str, asked: ReplayRequest, plain: bool) -> Credited:
    try:
        config = prepare_replay(asked)
        watch(config, plain=plain)
    except (ConfigError, AdvantageBreach) as refused:
        return Credited(name, "", str(refused))
    return Credited(name, config.name)


def samples(frames: Frames, credited: Sequence[Credited]) -> pl.DataFrame:
    """Return a row for each training sample: what it is, and the advantage that each algorithm gave it, by its name."""
    whole: pl.DataFrame | None = None
    for each in _held(credited):
        credits = frames.run(each.run)["samples"].select("sample_id", pl.col("advantage").alias(each.name)).collect()
        whole = credits if whole is None else whole.join(credits, "sample_id", "full", coalesce=True)
    return pl.DataFrame() if whole is None else whole


def figures(frames: Frames, each: Credited) -> dict[str, Any]:
    """Return what one algorithm's credits come to: samples, tokens by component, and the spread of what it gave."""
    credits = frames.run(each.run)["samples"]
    weighted = [pl.col(f"{name}_weights").list.eval(pl.element() != 0).list.sum().sum() for name in COMPONENTS]
    found = credits.select(
        pl.len().alias("num_samples"),
        *(count.alias(f"{name}_tokens") for name, count in zip(COMPONENTS, weighted, strict=True)),
        pl.col("advantage").mean().alias("advantage_mean"),
        pl.col("advantage").std(ddof=0).alias("advantage_std"),
        pl.col("advantage").min().alias("advantage_min"),
        pl.col("advantage").max().alias("advantage_max"),
        (pl.col("advantage").abs() < ZERO).mean().alias("zero_ratio"),
        pl.col("advantages").list.sum().sum().alias("signal"),
    )
    row = found.collect().row(0, named=True)
    num_tokens = row["rl_tokens"] + row["ref_kl_tokens"]
    return row | {"signal": row["signal"] / num_tokens if num_tokens else None}


COMPONENTS = ("rl", "ce", "ref_kl")
ZERO = 1e-9
"""An advantage below this teaches nothing."""


def _held(credited: Sequence[Credited]) -> Iterator[Credited]:
    return (each for each in credited if each.run)

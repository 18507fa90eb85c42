"""credit_run: a run's recorded rollouts, credited by several algorithms.

The rollouts, the verdicts and all before them are shared; only the advantage stage is done again, in memory, so that
what differs between two algorithms is the algorithm and nothing else. An algorithm that needs scores of a reference is
a replay that the store keeps: an engine made them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from configs.errors import ConfigError, did_you_mean
from configs.run import RunConfig
from configs.toml_text import toml
from flows.cli.arguments import stored_run
from flows.cli.launch import watch
from flows.replays.config import prepare_replay
from flows.replays.request import ReplayRequest, step_range
from flows.replays.scratch import credit_in_memory
from flows.runtime.resolve_run import find_policy
from storage.read.frames import Frames
from storage.store import Store
from tasks.advantage.algorithms.credit import AdvantageBreach
from tasks.arrays.samples import COMPONENTS

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"type": "grpo", "normalise_std": False},
    "grpo_std": {"type": "grpo", "normalise_std": True},
    "grpo_short": {"type": "grpo", "normalise_std": False, "length_penalty": {}},
    **{name: {"type": name} for name in ("dr_grpo", "rloo", "max_rl", "reinforce_pp", "hierarchical_grpo", "rae")},
    **{name: {"type": name} for name in ("echo", "supervised", "opsd", "opd")},
}
"""What is tried, by the name that its column has. sft would sample anew, so it is not here."""
NEED_ENGINE = {"opsd", "opd"}
"""opsd needs the field of the demonstration, opd the teacher."""
ZERO = 1e-9
"""An advantage below this teaches nothing."""


def credit_run(
    address: str, run: str, names: Sequence[str], steps: str, teacher: str, demonstration: str, plain: bool
) -> dict[str, Any]:
    """Return as plain values: figures by algorithm, and why algorithms refused the rollouts.

    Raises ConfigError for an unknown run, algorithm or teacher, and for a range of steps that is none.
    """
    step_range(steps)  # a mistake in it is no answer of an algorithm
    reader, run, recorded = stored_run(address, run)
    store = reader.store
    settings: dict[str, dict[str, Any]] = {}
    if teacher:
        settings["opd"] = {"teacher": {"path": _teacher(store, teacher)}}
    if demonstration:
        settings["opsd"] = {"demonstration": demonstration}
    names = names or [name for name in VARIANTS if name not in NEED_ENGINE - settings.keys()]
    if unknown := [name for name in names if name not in VARIANTS]:
        valid = f"{', '.join(VARIANTS)}{did_you_mean(unknown[0], VARIANTS)}"
        raise ConfigError([f"algorithms: {', '.join(unknown)}: the known ones are {valid}"])
    samples, refused = dict[str, pl.DataFrame](), []
    for name in names:
        try:
            request = credit_request(recorded, name, steps, settings.get(name, {}), address)
            samples[name] = _credit(store, prepare_replay(request), plain)
        except (ConfigError, AdvantageBreach) as error:
            refused.append({"name": name, "refusal": str(error)})
    return {"run": run, "algorithms": figures(samples), "refused": refused}


def _teacher(store: Store, teacher: str) -> str:
    if Path(teacher).expanduser().is_dir():
        return teacher
    policy = find_policy(store, teacher)
    assert policy is not None, "a policy that has a name is found or refused"
    return str(store.policies.directory(policy.key))


def _credit(store: Store, config: RunConfig, plain: bool) -> pl.DataFrame:
    if not config.scorers:
        return credit_in_memory(store, config)
    watch(config, plain=plain)
    return Frames(store).run(config.name)["samples"].collect()


def credit_request(
    recorded: RunConfig, name: str, steps: str = "", settings: Mapping[str, Any] | None = None, store: str = ""
) -> ReplayRequest:
    """Return the request of the replay that credits all rollouts of a run by one variant, and by nothing else.

    `settings` are what the variant needs. Neither what the run set for that type stays, nor the algorithm of an
    environment.
    """
    settings = {**VARIANTS[name], **(settings or {})}
    other = "grpo" if settings["type"] == "supervised" else "supervised"
    separate = [index for index, environment in enumerate(recorded.environments) if environment.algorithm is not None]
    overrides = [
        f"algorithm.type={other}",  # another type first: the settings of a type go when the type changes
        f"algorithm={toml(settings)}",
        *(f"environments.{index}.algorithm=null" for index in separate),
    ]
    new_run = f"{recorded.name}-by-{name}" + (f"-{steps.replace(':', '-')}" if steps else "")
    return ReplayRequest(recorded.name, "advantage", "advantage", steps, overrides, new_run, store)


def figures(samples: Mapping[str, pl.DataFrame]) -> list[dict[str, Any]]:
    """Return for each algorithm's samples: their number, tokens by component, and the distribution of advantages.

    `agreement` is the correlation with grpo's advantages, null where grpo is missing or all are equal. `signal` is the
    mean over tokens that carry an advantage: what a token carries in ce is a weight.
    """
    if not samples:
        return []
    columns = ["sample_id", "advantage", "advantages", *(f"{part}_weights" for part in COMPONENTS)]
    # Types of other columns differ between frames in memory and frames of the store.
    frames = {name: frame.select(columns) for name, frame in samples.items()}
    grpo = frames.get("grpo", pl.DataFrame(schema={"sample_id": pl.String, "advantage": pl.Float64}))
    rows = pl.concat([frame.with_columns(name=pl.lit(name)) for name, frame in frames.items()])
    rows = rows.join(grpo.select("sample_id", grpo="advantage"), on="sample_id", how="left")
    advantage = pl.col("advantage")
    table = rows.group_by("name").agg(
        num_samples=pl.len(),
        **{f"{part}_tokens": (pl.col(f"{part}_weights").explode() != 0).sum() for part in COMPONENTS},
        advantage_mean=advantage.mean(),
        advantage_std=advantage.std(ddof=0),
        advantage_min=advantage.min(),
        advantage_max=advantage.max(),
        zero_ratio=(advantage.abs() < ZERO).mean(),
        agreement=pl.corr("advantage", "grpo").fill_nan(None),
        signal=pl.col("advantages").explode().sum(),
    )
    # An algorithm without samples is a row as well.
    table = pl.DataFrame({"name": list(samples)}).join(table, on="name", how="left", maintain_order="left")
    counts = pl.col("num_samples", *(f"{part}_tokens" for part in COMPONENTS)).fill_null(0)
    num_tokens = pl.col("rl_tokens") + pl.col("ref_kl_tokens")
    signal = pl.when(num_tokens > 0).then(pl.col("signal") / num_tokens)
    return table.with_columns(counts).with_columns(signal=signal).to_dicts()

"""Credits a run's recorded rollouts by several algorithms, and lays the credits side by side.

The rollouts, the verdicts and all before them are shared; only the advantage stage is done again, in memory, so that
what differs between two columns is the algorithm and nothing else. An algorithm that needs scores of a reference is a
replay that the store keeps: an engine made them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from configs.errors import ConfigError, did_you_mean
from configs.run import RunConfig
from configs.store import default_store
from configs.toml_text import toml
from flows.cli.arguments import Force, Json, Plain, StoreOption, option
from flows.cli.launch import watch
from flows.queries.store_reader import recorded_run
from flows.replays.config import prepare_replay
from flows.replays.request import ReplayRequest, step_range
from flows.replays.scratch import credit_in_memory
from flows.reporting.artifacts import escape
from flows.reporting.formats import compact_number, console, grid, markdown_table
from flows.reporting.output_files import check_output, write_text
from flows.runtime.resolve_run import find_policy
from storage.read.frames import Frames, existing_store
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
NEED_ENGINE = ("opsd", "opd")
"""opsd needs the field of the demonstration, opd the teacher."""
ZERO = 1e-9
"""An advantage below this teaches nothing."""
ROUNDING = 5e-7
"""A figure below this is what is left of a sum that is zero."""
FIGURES = {
    "samples": "num_samples",
    "rl tokens": "rl_tokens",
    "ce tokens": "ce_tokens",
    "ref_kl tokens": "ref_kl_tokens",
    "mean": "advantage_mean",
    "std": "advantage_std",
    "min": "advantage_min",
    "max": "advantage_max",
    "none": "zero_ratio",
    "with grpo": "agreement",
    "signal": "signal",
}
"""The columns of the table after the algorithm's name, each with its figure."""
SHOWN = 8
"""Rollouts of a group that are shown one by one."""


@dataclass(frozen=True)
class Credited:
    """What one algorithm made of a run's rollouts."""

    name: str
    samples: pl.DataFrame | None
    """The training samples with their credits and steps; None where the algorithm refused the rollouts."""
    refusal: str = ""
    """Why it refused them."""


def algorithms(
    run: Annotated[str, option("the recorded run; it is not changed", "RUN")],
    /,
    *names: Annotated[str, option("algorithms; without any, all that need no engine", "ALGORITHM")],
    steps: Annotated[str, option("steps: 3:10 is 3 to 9; without it, all", "A:B")] = "",
    teacher: Annotated[str, option("for opd: a directory of weights, RUN, or RUN:VERSION", "POLICY")] = "",
    demonstration: Annotated[
        str, option("for opsd: the field of the example that holds a demonstration", "FIELD")
    ] = "",
    output: Annotated[str, option("write a page in Markdown", "FILE")] = "",
    force: Force = False,
    store: StoreOption = "",
    as_json: Json = False,
    plain: Plain = False,
) -> int:
    """Credit a run's rollouts by several algorithms and print the result, or write it as a page.

    With `teacher` the default algorithms include opd, with `demonstration` opsd. An algorithm that refuses the rollouts
    is part of the result. Raises ConfigError for an unknown run, algorithm or teacher.
    """
    step_range(steps)  # a mistake in it is no answer of an algorithm
    if output:
        check_output(Path(output), force)  # before the credits, not after them
    root = existing_store(store or default_store())
    run, recorded = recorded_run(root, run)
    given: dict[str, dict[str, Any]] = {}
    if teacher:
        given["opd"] = {"teacher": {"path": _teacher(root, teacher)}}
    if demonstration:
        given["opsd"] = {"demonstration": demonstration}
    chosen = names or [name for name in VARIANTS if name not in NEED_ENGINE or name in given]
    if unknown := [name for name in chosen if name not in VARIANTS]:
        known = f"{', '.join(VARIANTS)}{did_you_mean(unknown[0], VARIANTS)}"
        raise ConfigError([f"algorithms: {', '.join(unknown)}: the known ones are {known}"])
    requests = {name: credit_request(recorded, name, steps, given.get(name, {}), store) for name in chosen}
    credited = [_credit(root, name, request, plain or as_json) for name, request in requests.items()]
    found = describe_credits(Frames(root), run, credited)
    if output:
        options = {"steps": steps, "teacher": teacher, "demonstration": demonstration}
        write_text(Path(output), page(found, options), force)
        print(f"written to {output}")
    elif as_json:
        print(json.dumps(found, sort_keys=True))
    else:
        out = console()
        out.print(f"the rollouts of {found['run']}, credited side by side")
        out.print(grid(("algorithm", *FIGURES), map(_cells, found["algorithms"])))
        for each in found["refused"]:
            out.print(f"{each['name']} refused: {' '.join(each['refusal'].split())}")
    return 0


def _teacher(root: Store, teacher: str) -> str:
    if Path(teacher).expanduser().is_dir():
        return teacher
    policy = find_policy(root, teacher)
    assert policy is not None, "a policy that has a name is found or refused"
    return str(root.policies.directory(policy.key))


def credit_request(
    recorded: RunConfig, name: str, steps: str = "", given: Mapping[str, Any] | None = None, store: str = ""
) -> ReplayRequest:
    """Return what is asked of the replay that credits all rollouts of a run by one variant, and by nothing else.

    `given` are settings that the variant needs. Neither what the run set for that type stays, nor the
    algorithm that one of its environments has of its own.
    """
    settings = {**VARIANTS[name], **(given or {})}
    other = "grpo" if settings["type"] == "supervised" else "supervised"
    own = [number for number, each in enumerate(recorded.environments) if each.algorithm is not None]
    overrides = [
        f"algorithm.type={other}",  # another type first: the settings of a type go when the type changes
        f"algorithm={toml(settings)}",
        *(f"environments.{number}.algorithm=null" for number in own),
    ]
    of_steps = f"-{steps.replace(':', '-')}" if steps else ""
    run = recorded.name
    return ReplayRequest(run, "advantage", "advantage", steps, overrides, f"{run}-by-{name}{of_steps}", store)


def _credit(store: Store, name: str, request: ReplayRequest, plain: bool) -> Credited:
    try:
        config = prepare_replay(request)
        if not config.scorers:
            return Credited(name, credit_in_memory(store, config))
        watch(config, plain=plain)
    except (ConfigError, AdvantageBreach) as refused:
        return Credited(name, None, str(refused))
    return Credited(name, Frames(store).run(config.name)["samples"].collect())


def describe_credits(frames: Frames, run: str, credited: Sequence[Credited]) -> dict[str, Any]:
    """Return everything that is shown, as plain values: figures by algorithm, one group by rollout, refusals."""
    held = {each.name: each.samples for each in credited if each.samples is not None}
    laid = side_by_side(held)
    rows = [{"name": name, **figures(made), "agreement": _agreement(laid, name)} for name, made in held.items()]
    refused = [{"name": each.name, "refusal": each.refusal} for each in credited if each.samples is None]
    traces = frames.run(run)["traces"]
    return {"run": run, "algorithms": rows, "refused": refused, "group": _group(traces, laid, [*held.values()])}


def side_by_side(held: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return a row for each training sample: its id, and the advantage that each algorithm gave it, by its name."""
    columns = [made.select("sample_id", pl.col("advantage").alias(name)) for name, made in held.items()]
    # Algorithms differ in which samples they make, so a sample that one lacks stays, with null there.
    return reduce(lambda one, other: one.join(other, "sample_id", "full", coalesce=True), columns or [pl.DataFrame()])


def figures(samples: pl.DataFrame) -> dict[str, Any]:
    """Return what one algorithm's credits come to: samples, tokens by component, and the spread of what it gave."""
    advantage = pl.col("advantage")
    weighted = {
        f"{name}_tokens": pl.col(f"{name}_weights").list.eval(pl.element() != 0).list.sum().sum() for name in COMPONENTS
    }
    row = samples.select(
        num_samples=pl.len(),
        **weighted,
        advantage_mean=advantage.mean(),
        advantage_std=advantage.std(ddof=0),
        advantage_min=advantage.min(),
        advantage_max=advantage.max(),
        zero_ratio=(advantage.abs() < ZERO).mean(),
        signal=pl.col("advantages").list.sum().sum(),
    ).row(0, named=True)
    # What a token carries in ce is a weight and no advantage, so those tokens are no part of the mean.
    num_tokens = row["rl_tokens"] + row["ref_kl_tokens"]
    return row | {"signal": row["signal"] / num_tokens if num_tokens else None}


def _agreement(laid: pl.DataFrame, name: str) -> float | None:
    """Return the correlation of an algorithm's advantages with grpo's; None without grpo, or where all are equal."""
    if "grpo" not in laid.columns:
        return None
    both = laid.select(grpo="grpo", other=name).drop_nulls()
    value = both.select(pl.corr("grpo", "other")).item() if both.height else None
    return None if value is None or math.isnan(value) else value


def _group(traces: pl.LazyFrame, laid: pl.DataFrame, held: Sequence[pl.DataFrame]) -> dict[str, Any] | None:
    """Return the group with the most different rewards, and rollouts of it from the best to the worst."""
    if not held or not laid.height:
        return None
    credits = held[0].select("sample_id", "trace_id", "group_id", "step", "reward")
    rewards = pl.col("reward")
    spread = credits.group_by("step", "group_id").agg(kinds=rewards.n_unique(), spread=rewards.std())
    widest = spread.sort("kinds", "spread", "step", "group_id", descending=[True, True, False, False], nulls_last=True)
    step, group_id = widest.row(0)[:2]
    lengths = traces.select("trace_id", "num_output_tokens").collect()
    members = credits.filter(step=step, group_id=group_id).join(laid, "sample_id").join(lengths, "trace_id")
    ordered = members.sort("reward", "num_output_tokens", "sample_id", descending=[True, False, False])
    last = ordered.height - 1
    # Spread evenly from the best to the worst, both included; of a small group some places coincide.
    places = sorted({round(place * last / (SHOWN - 1)) for place in range(SHOWN)})
    return {"step": step, "group_id": group_id, "rows": ordered[places].to_dicts()}


def page(found: dict[str, Any], options: Mapping[str, str] | None = None) -> str:
    """Return the comparison as markdown; `options` are those of the command."""
    names = [row["name"] for row in found["algorithms"]]
    words = [found["run"], *names, *(each["name"] for each in found["refused"])]
    words += [f"--{name} {value}" for name, value in (options or {}).items() if value]
    lines = [
        f"# The rollouts of {found['run']}, credited side by side",
        "",
        "Made by the command below. The rollouts and verdicts are the same in every row; only the advantage stage was",
        "done again. Advantages are those of samples: `none` is the share of samples whose advantage is zero, and",
        "`with grpo` the correlation (Pearson) of the samples' advantages with grpo's. `signal` is the mean of what",
        "tokens carry in rl and ref_kl; in ref_kl that is log pi_ref - log pi. A dash: there is none, or all are",
        "equal.",
        "",
        "```bash",
        f"stagecoach algorithms {' '.join(words)}",
        "```",
        "",
        *markdown_table(("algorithm", *FIGURES), map(_cells, found["algorithms"])),
        "",
    ]
    if group := found["group"]:
        shown = [name for name in names if any(row[name] is not None for row in group["rows"])]
        rows = [
            [_number(row["reward"]), row["num_output_tokens"], *(_number(row[name]) for name in shown)]
            for row in group["rows"]
        ]
        lines += [f"## One group: step {group['step']}, group {group['group_id']}", ""]
        lines += markdown_table(("reward", "tokens", *shown), rows)
    if found["refused"]:
        refusals = (f"- `{each['name']}`: {escape(each['refusal'])}" for each in found["refused"])
        lines += ["", "## Refused", "", *refusals]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], *(_number(row[name]) for name in FIGURES.values())]


def _number(value: float | None) -> str:
    return compact_number(0 if value is not None and abs(value) < ROUNDING else value)

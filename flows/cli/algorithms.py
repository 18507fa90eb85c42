"""Credits a run's recorded rollouts by several algorithms, each in a replay of its own, and lays them side by side.

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
from flows.reporting.artifacts import escaped
from flows.reporting.formats import compact_number, console, grid, markdown_table
from flows.runtime.policies import find_policy
from storage.errors import border
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


HEADINGS = ("algorithm", "samples", "rl tokens", "ce tokens", "ref_kl tokens", "mean", "std", "min", "max", "none",
            "with grpo", "signal")  # fmt: skip
COLUMNS = ("num_samples", "rl_tokens", "ce_tokens", "ref_kl_tokens", "advantage_mean", "advantage_std",
           "advantage_min", "advantage_max", "zero_ratio", "agreement", "signal")  # fmt: skip
SHOWN = 8
"""Rollouts of a group that are shown one by one."""


def main(
    run: str,
    names: Sequence[str] = (),
    steps: str = "",
    teacher: str = "",
    demonstration: str = "",
    store: str = "",
    output: str = "",
    as_json: bool = False,
    plain: bool = False,
) -> int:
    """Credit a run's rollouts by several algorithms and print, or write as a page, what came of it; return 0."""
    frames, run, credited = credit_all(run, names, steps, teacher, demonstration, store, plain=plain or as_json)
    found = described(frames, run, credited)
    if output:
        with border("writing a page", output):
            Path(output).write_text(page(found, _options(steps, teacher, demonstration)), encoding="utf-8")
        print(f"written to {output}")
    elif as_json:
        print(json.dumps(found, sort_keys=True))
    else:
        _print(found)
    return 0


def described(frames: Frames, run: str, credited: Sequence[Credited]) -> dict[str, Any]:
    """Return everything that is shown, as plain values: figures by algorithm, one group by rollout, refusals."""
    laid = samples(frames, credited)
    rows = []
    for each in (one for one in credited if one.run):
        rows.append({"name": each.name, "run": each.run, **figures(frames, each), "agreement": _agreement(laid, each)})
    refused = [{"name": each.name, "refusal": each.refusal} for each in credited if not each.run]
    return {"run": run, "algorithms": rows, "refused": refused, "group": _group(frames, laid, rows)}


def _options(steps: str, teacher: str, demonstration: str) -> str:
    given = {"steps": steps, "teacher": teacher, "demonstration": demonstration}
    return "".join(f" --{name} {value}" for name, value in given.items() if value)


def page(found: dict[str, Any], options: str = "") -> str:
    """Return the comparison as markdown; `options` are those of the command."""
    names = [row["name"] for row in found["algorithms"]]
    asked = " ".join(names + [each["name"] for each in found["refused"]])
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
        f"stagecoach algorithms {found['run']} {asked}{options}",
        "```",
        "",
        *markdown_table(HEADINGS, (_cells(row) for row in found["algorithms"])),
        "",
        *_group_lines(found["group"], names),
    ]
    if found["refused"]:
        lines += [
            "",
            "## Refused",
            "",
            *(f"- `{each['name']}`: {escaped(each['refusal'])}" for each in found["refused"]),
        ]
    return "\n".join(lines) + "\n"


def _group_lines(group: dict[str, Any] | None, names: Sequence[str]) -> list[str]:
    if group is None:
        return []
    shown = [name for name in names if any(row[name] is not None for row in group["rows"])]
    cells = (
        [_number(row["reward"]), row["num_output_tokens"], *(_number(row[name]) for name in shown)]
        for row in group["rows"]
    )
    return [
        f"## One group: step {group['step']}, group {group['group_id']}",
        "",
        *markdown_table(("reward", "tokens", *shown), cells),
    ]


def _group(frames: Frames, laid: pl.DataFrame, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the group with the most different rewards, and rollouts of it from the best to the worst."""
    if not rows or not laid.height:
        return None
    own = frames.run(rows[0]["run"])
    credits = own["samples"].select("sample_id", "trace_id", "group_id", "step", "reward").collect()
    rewards = pl.col("reward")
    spread = credits.group_by("step", "group_id").agg(rewards.n_unique().alias("kinds"), rewards.std().alias("spread"))
    widest = spread.sort("kinds", "spread", "step", "group_id", descending=[True, True, False, False], nulls_last=True)
    step, group_id = widest.row(0)[:2]
    traces = own["traces"].select("trace_id", "num_output_tokens").collect()
    members = credits.filter(step=step, group_id=group_id).join(laid, "sample_id").join(traces, "trace_id")
    ordered = members.sort("reward", "num_output_tokens", "sample_id", descending=[True, False, False])
    last = ordered.height - 1
    places = sorted({round(place * last / (SHOWN - 1)) for place in range(SHOWN)})
    return {"step": step, "group_id": group_id, "rows": ordered[places].to_dicts()}


def _agreement(laid: pl.DataFrame, each: Credited) -> float | None:
    if "grpo" not in laid.columns:
        return None
    both = laid.select("grpo" if each.name == "grpo" else ["grpo", each.name]).drop_nulls()
    if not both.height:
        return None
    value = both.select(pl.corr("grpo", each.name)).item()
    return None if value is None or value != value else value


def _cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], *(_number(row[name]) for name in COLUMNS)]


def _number(value: float | None) -> str:
    return compact_number(0 if value is not None and abs(value) < 5e-7 else value)  # what is left of a sum that is zero


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _print(found: dict[str, Any]) -> None:
    out = console()
    out.print(f"the rollouts of {found['run']}, credited side by side")
    out.print(grid(HEADINGS, (_cells(row) for row in found["algorithms"])))
    for each in found["refused"]:
        out.print(f"{each['name']} refused: {_one_line(each['refusal'])}")

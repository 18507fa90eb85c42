"""The page that lays a run's rollouts, as several algorithms credit them, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from flows.cli.algorithms import Credited, credit_all, figures, samples
from flows.reporting.artifacts import escaped
from flows.reporting.formats import compact_number, console, grid, markdown_table
from storage.errors import border
from storage.read.frames import Frames

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

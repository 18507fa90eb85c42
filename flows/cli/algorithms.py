"""The command algorithms: a run's recorded rollouts, credited by several algorithms, as a table or a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from flows.cli.arguments import Force, Json, Plain, StoreOption, option
from flows.reporting.formats import compact_number, console, grid, markdown_table, one_line

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
ROUNDING = 5e-7
"""A figure below this is what is left of a sum that is zero."""
ABOUT = """\
Made by the command below. The rollouts and verdicts are the same in every row; only the advantage stage was done again.
Advantages are those of samples: `none` is the share of samples whose advantage is zero, and `with grpo` the correlation
(Pearson) of the samples' advantages with grpo's. `signal` is the mean of what tokens carry in rl and ref_kl; in ref_kl
that is log pi_ref - log pi. A dash: there is none, or all are equal."""
MAX_REFUSAL = 1000
"""Characters of a refusal that are printed."""


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
    from flows.cli.credits import credit_run
    from flows.reporting.output_files import check_output, write_text

    if output:
        check_output(Path(output), force)  # before the credits, not after them
    options = {"steps": steps, "teacher": teacher, "demonstration": demonstration}
    report = credit_run(store, run, names, **options, plain=plain or as_json)
    if output:
        write_text(Path(output), page(report, options), force)
        print(f"written to {output}")
    elif as_json:
        print(json.dumps(report, sort_keys=True))
    else:
        console().print(f"the rollouts of {report['run']}, credited side by side")
        console().print(grid(*_table(report)))
        for refused in report["refused"]:
            console().print(f"{refused['name']} refused: {' '.join(refused['refusal'].split())}")
    return 0


def page(report: dict[str, Any], options: Mapping[str, str]) -> str:
    """Return the comparison as markdown; `options` are those of the command."""
    names = [row["name"] for part in ("algorithms", "refused") for row in report[part]]
    words = [report["run"], *names, *(f"--{name} {value}" for name, value in options.items() if value)]
    lines = [f"# The rollouts of {report['run']}, credited side by side", "", ABOUT, ""]
    lines += ["```bash", f"stagecoach algorithms {' '.join(words)}", "```", "", *markdown_table(*_table(report)), ""]
    if report["refused"]:
        lines += ["", "## Refused", ""]
        lines += [f"- `{row['name']}`: {one_line(row['refusal'], MAX_REFUSAL)}" for row in report["refused"]]
    return "\n".join(lines) + "\n"


def _table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in report["algorithms"]:
        values = (0 if abs(row[name] or 1) < ROUNDING else row[name] for name in FIGURES.values())
        rows.append([row["name"], *map(compact_number, values)])
    return ["algorithm", *FIGURES], rows

"""Commands that compare runs and algorithms: diff, algorithms, curves, evals."""

from typing import Annotated

from flows.cli.arguments import Force, Index, Json, Plain, Store, option


def diff(
    run_a: Annotated[str, option("the first run", "RUN_A")],
    run_b: Annotated[str, option("the run that is compared with it", "RUN_B")],
    /,
    *,
    step: Annotated[Index | None, option("compare one step: its traces, samples and groups")] = None,
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """Compare two runs: settings, shared work, figures."""
    from flows.cli.comparisons import diff

    return diff(run_a, run_b, step=step, as_json=as_json, store=store)


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
    store: Store = "",
    as_json: Json = False,
    plain: Plain = False,
) -> int | None:
    """Credit a run's rollouts with several algorithms, side by side."""
    from flows.cli.algorithms import algorithms

    return algorithms(
        run, names, steps, teacher, demonstration, store, output, as_json=as_json, plain=plain, force=force
    )


def curves(
    *runs: Annotated[str, option("one run or several", "RUN", required=True)],
    output: Annotated[str, option("write a page in Markdown, and its picture", "FILE")] = "",
    force: Force = False,
    store: Store = "",
) -> int | None:
    """Show the rewards of several runs by step, side by side."""
    from flows.cli.comparisons import curves

    return curves(runs, store=store, output=output, force=force)


def evals(
    *runs: Annotated[str, option("runs; without any, the newest", "RUN")],
    by: Annotated[str, option("separate figures for each value of a field of the examples' tasks", "FIELD")] = "",
    output: Annotated[str, option("write the figures as Parquet, one row for each", "FILE")] = "",
    force: Force = False,
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """List evaluations of runs, each with its difference to the first."""
    from flows.cli.comparisons import evals

    return evals(runs or ["latest"], store=store, by=by, output=output, as_json=as_json, force=force)

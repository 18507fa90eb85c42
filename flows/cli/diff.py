"""Commands that compare runs and algorithms: diff, algorithms, curves, evals."""

from typing import Annotated

from flows.cli.arguments import Force, Index, Json, Plain, Store, option


def diff(
    run_a: Annotated[str, option("", "RUN_A")],
    run_b: Annotated[str, option("", "RUN_B")],
    /,
    *,
    step: Annotated[Index | None, option("go into one step: its traces, samples and groups")] = None,
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """How two runs differ: settings, shared work, and what came of it."""
    from flows.cli.comparisons import diff

    return diff(run_a, run_b, step=step, as_json=as_json, store=store)


def algorithms(
    run: Annotated[str, option("the recorded run; it is not changed", "RUN")],
    /,
    *names: Annotated[str, option("which; without any, all that need no engine", "ALGORITHM")],
    steps: Annotated[str, option("which steps: 3:10 is 3 to 9; all without it", "A:B")] = "",
    teacher: Annotated[str, option("for opd: a directory of weights, RUN, or RUN:VERSION", "POLICY")] = "",
    demonstration: Annotated[
        str, option("for opsd: the field of the example that holds a demonstration", "FIELD")
    ] = "",
    output: Annotated[str, option("write a page in markdown", "FILE")] = "",
    force: Force = False,
    store: Store = "",
    as_json: Json = False,
    plain: Plain = False,
) -> int | None:
    """A run's rollouts credited by several algorithms, side by side."""
    from flows.cli.algorithms import algorithms

    return algorithms(
        run, names, steps, teacher, demonstration, store, output, as_json=as_json, plain=plain, force=force
    )


def curves(
    *runs: Annotated[str, option("", "RUN", required=True)],
    output: Annotated[str, option("write a page in markdown, and its picture", "FILE")] = "",
    force: Force = False,
    store: Store = "",
) -> int | None:
    """The rewards of several runs by step, side by side."""
    from flows.cli.comparisons import curves

    return curves(runs, store=store, output=output, force=force)


def evals(
    *runs: Annotated[str, option("the newest without any", "RUN")],
    by: Annotated[str, option("tell the values of a field of the examples' tasks apart", "FIELD")] = "",
    output: Annotated[str, option("write them as Parquet, one row for each figure", "FILE")] = "",
    force: Force = False,
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """The evaluations of runs, and how far each is from the first."""
    from flows.cli.comparisons import evals

    return evals(runs or ["latest"], store=store, by=by, output=output, as_json=as_json, force=force)

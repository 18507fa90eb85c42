"""diff, evals, mismatch: commands that compare runs, policies on held-out examples, and engine with learner."""

import json
import sys
from pathlib import Path
from typing import Annotated

from flows.cli.arguments import Force, Index, Json, RunOrLatest, StoreOption, open_reader, option, stored_run
from flows.cli.output import print_records, print_report
from flows.reporting.formats import fits_width


def diff(
    run_a: Annotated[str, option("the first run", "RUN_A")],
    run_b: Annotated[str, option("the run that is compared with it", "RUN_B")],
    /,
    *,
    step: Annotated[Index | None, option("compare one step: its rollouts and training samples")] = None,
    everything: Annotated[bool, option("print all that differs, with the work of each stage", name="--all")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print how the second run differs from the first, in 40 lines at most; all with `step` or `everything`.

    Raises RunUnknown, NotThere for a step that neither run has, LayoutError without a store.
    """
    from flows.cli.difference import summary
    from flows.queries.compare import ComparedStep, compare, first_differing_rollout
    from flows.queries.store_reader import recorded_run

    reader, a, _ = stored_run(store, run_a)
    b, _ = recorded_run(reader.store, run_b)
    comparison = dict(compare(reader, a, b)) | {"first_rollout": first_differing_rollout(reader, a, b)}
    if step is not None:
        comparison |= ComparedStep(reader, a, b, step).detail()
    if as_json:
        print(json.dumps(comparison, sort_keys=True))
        return 0
    if step is None and not everything:
        print_report(summary(comparison))
        return 0
    del comparison["pieces"], comparison["figures"]
    print_report(comparison | {"parting": [comparison["parting"]] * bool(comparison["parting"])})
    return 0


def evals(
    *runs: Annotated[str, option("runs; without any, the newest", "RUN")],
    by: Annotated[str, option("separate figures for each value of a field of the examples' tasks", "FIELD")] = "",
    output: Annotated[str, option("write the figures as Parquet, one row for each", "FILE")] = "",
    force: Force = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the evaluations of runs, or write them as Parquet.

    Raises RunUnknown, NotThere for runs without evaluations, FieldMissing for a field that examples lack.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from flows.cli.evaluation_rows import SCHEMA, cells, evaluation_rows
    from flows.queries.request import NotThere
    from flows.queries.scores import mixed_policies
    from flows.queries.store_reader import recorded_run
    from flows.reporting.output_files import write_whole
    from flows.reporting.panel import printable

    reader = open_reader(store)
    named = [recorded_run(reader.store, name) for name in runs or ["latest"]]
    rows = list(evaluation_rows(reader.store, named, by))
    if not rows:
        names = ", ".join(name for name, _ in named)
        raise NotThere(f"{names}: no policy was evaluated; do so with stagecoach eval")
    if output:
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_whole(Path(output), lambda draft: pq.write_table(table, draft), force)
        print(f"{len(rows)} figures written to {Path(output)}")
        return 0
    num_optional = 3 if len({row["environment"] for row in rows}) == 1 else 2  # which one is known
    print_records(rows, cells, (0, 1, 2, 5) if by else (0, 1, 4), as_json, num_optional)
    for line in filter(None, (mixed_policies(reader.store, name) for name, _ in named)):
        print(printable(line), file=sys.stdout if fits_width() and not as_json else sys.stderr)
    return 0


def mismatch(run: RunOrLatest = "latest", /, *, store: StoreOption = "", as_json: Json = False) -> int:
    """Print how far the log-probs of engine and learner are apart, by properties of tokens, and the likely cause.

    Raises RunUnknown, LayoutError without a store.
    """
    from flows.queries.mismatch import mismatch as split_mismatch

    print_report(split_mismatch(*stored_run(store, run)), as_json)
    return 0

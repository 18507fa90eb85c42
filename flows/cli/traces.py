"""The command traces: the rollouts of a step, an evaluation or a run."""

from typing import Annotated

from flows.cli.arguments import Count, Index, Json, StoreOption, one_of, open_reader, option, run_and_step

SOURCE = one_of()


def traces(
    run: Annotated[str, option("a run, `latest` for the newest, or a step of it as RUN:STEP", "RUN")] = "latest",
    /,
    *,
    step: Annotated[Index | None, option("the step; by default the last one", group=SOURCE)] = None,
    evaluation: Annotated[Index | None, option("the evaluation of this version", "VERSION", group=SOURCE)] = None,
    of_set: Annotated[str | None, option("only this set of the evaluation", "NAME", name="--set")] = None,
    where: Annotated[
        str,
        option("only rollouts that meet a condition: \"reward > 0.8 and reply ~ 'x'\"", allow_leading_hyphen=True),
    ] = "",
    sort: Annotated[str, option("sort by a column; by default in recorded order", "COLUMN")] = "",
    desc: Annotated[bool, option("highest first")] = False,
    limit: Annotated[Count, option("number of rollouts on a page")] = 40,
    page: Annotated[Count, option("number of the page")] = 1,
    columns: Annotated[str, option("these columns", "A,B")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the traces of a step or an evaluation, or with `where` those of the run that meet the condition.

    Raises NotThere, BadQuestion, LayoutError without a store.
    """
    from flows.cli.trace_list import TraceSource, print_list
    from flows.queries.request import BadQuestion
    from flows.queries.rollout_list import ASCENDING, DESCENDING, TraceChoice

    run, step = run_and_step(run, step, evaluation)
    if of_set is not None and evaluation is None:
        raise BadQuestion("--set chooses of an evaluation: name its policy's version with --evaluation")
    chosen = tuple(filter(None, columns.split(",")))
    choice = TraceChoice({}, sort, DESCENDING if desc else ASCENDING, page, limit, chosen)
    print_list(open_reader(store), run, TraceSource(step, evaluation, of_set, where), choice, as_json)
    return 0

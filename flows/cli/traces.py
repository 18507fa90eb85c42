"""The command traces: the rollouts of a step, an evaluation or a run."""

from typing import Annotated

from flows.cli.arguments import Count, Index, Json, StoreOption, one_of, open_reader, option, run_and_step

SOURCE, ORDER = one_of(), one_of()
OUTCOMES = (
    "trained, filtered, errored, stopped, stale, quarantined, 'no weight', refused, pending, evaluated or expired"
)


def traces(
    run: Annotated[str, option("a run, `latest` for the newest, or a step of it as RUN:STEP", "RUN")] = "latest",
    /,
    *,
    step: Annotated[Index | None, option("the step; by default the last one", group=SOURCE)] = None,
    evaluation: Annotated[Index | None, option("the evaluation of this version", "VERSION", group=SOURCE)] = None,
    of_set: Annotated[str | None, option("only this set of the evaluation", "NAME", name="--set")] = None,
    env: Annotated[str, option("only rollouts of this environment", "ENVIRONMENT")] = "",
    agent: Annotated[str, option("only rollouts of this agent", "AGENT")] = "",
    outcome: Annotated[str, option(OUTCOMES, "OUTCOME")] = "",
    error: Annotated[str, option("only rollouts with an error of this class", "CLASS")] = "",
    filter: Annotated[str, option("only rollouts that this filter flagged, enforced or not", "FILTER")] = "",
    reason: Annotated[str, option("only rollouts that this filter dropped", "FILTER")] = "",
    trained: Annotated[str, option("only rollouts that were trained on (yes), or were not (no)", "YES|NO")] = "",
    group: Annotated[str, option("only rollouts of this group", "GROUP")] = "",
    example: Annotated[str, option("only rollouts of this example", "EXAMPLE")] = "",
    grep: Annotated[
        str, option("only rollouts with this text, in upper or lower case", "TEXT", allow_leading_hyphen=True)
    ] = "",
    where: Annotated[
        str,
        option("only rollouts that meet a condition: \"reward > 0.8 and reply ~ 'x'\"", allow_leading_hyphen=True),
    ] = "",
    sort: Annotated[str, option("sort by a column; by default in recorded order", "COLUMN")] = "",
    asc: Annotated[bool, option("lowest first, which is the default", group=ORDER)] = False,
    desc: Annotated[bool, option("highest first", group=ORDER)] = False,
    limit: Annotated[Count, option("number of traces on a page")] = 40,
    page: Annotated[Count, option("number of the page")] = 1,
    columns: Annotated[str, option("these columns; reward:NAME and metric:NAME too", "A,B")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the traces of a step or an evaluation, or with `where` those of the run that meet the condition.

    Raises NotThere, BadQuestion, LayoutError without a store.
    """
    from flows.cli.trace_list import print_list
    from flows.queries.request import BadQuestion
    from flows.queries.rollout_list import TraceChoice, read_names

    run, step = run_and_step(run, step, evaluation)
    if of_set is not None and evaluation is None:
        raise BadQuestion("--set chooses of an evaluation: name its policy's version with --evaluation")
    choice = TraceChoice(
        *(env, agent, outcome, filter, reason, error, trained, group, example, grep, sort),
        order="desc" if desc else "asc",
        page=page,
        size=limit,
        columns=read_names(columns),
    )
    reader = open_reader(store)
    print_list(reader, run, choice, (step, evaluation, of_set), where, as_json)
    return 0

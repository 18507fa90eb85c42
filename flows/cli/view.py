"""Commands that show rollouts: view (in a browser), traces (a list) and trace (one of them), on the terminal."""

from typing import Annotated

from flows.cli.arguments import (
    Count,
    Force,
    Index,
    Json,
    Port,
    StoreOption,
    one_of,
    option,
    run_and_step,
)

OUTCOMES = (
    "trained, filtered, errored, stopped, stale, quarantined, 'no weight', refused, pending, evaluated or expired"
)
COLOURS = """\
the measure that colours tokens: advantage, weight (the component of the loss), rl_weight, ce_weight, ref_kl_weight, \
trained_rl_weight, engine, learner, ratio, mismatch, entropy, reference, signal, outside, policy, mask, trained"""
SOURCE, ORDER, CONTENT, FORM = one_of(), one_of(), one_of(), one_of()


def view(
    *,
    run: Annotated[str, option("open this run, `latest` for the newest; without it, the list of runs")] = "",
    host: Annotated[str, option("address to listen on; only this machine by default")] = "127.0.0.1",
    port: Annotated[Port | None, option("port to listen on; by default a free one from 8265 on")] = None,
    browse: Annotated[bool, option("open a browser", name="--open")] = False,
    save: Annotated[tuple[str, str] | None, option("write a page to a file instead", "ADDRESS FILE")] = None,
    force: Force = False,
    store: StoreOption = "",
) -> int | None:
    """Show runs, rollouts and gradients in a browser; it only reads."""
    if save is None:
        from flows.viewer.serving import main

        return main(store=store, run=run, host=host, port=port, browse=browse)
    from flows.queries.request import BadQuestion
    from flows.viewer.rendering import save as save_page

    if run or browse or port is not None:
        raise BadQuestion("--save writes one page and starts nothing: it goes without --run, --port and --open")
    return save_page(*save, store=store, force=force)


def traces(
    run: Annotated[str, option("a run, `latest` for the newest, or a step of it as RUN:STEP", "RUN")] = "latest",
    /,
    *,
    step: Annotated[Index | None, option("the step; by default the last one", group=SOURCE)] = None,
    evaluation: Annotated[Index | None, option("the evaluation of this version", "VERSION", group=SOURCE)] = None,
    of_set: Annotated[str | None, option("only this set of the evaluation", "NAME", name="--set")] = None,
    env: Annotated[str, option("only of this environment", "X")] = "",
    agent: Annotated[str, option("only of this agent", "X")] = "",
    outcome: Annotated[str, option(OUTCOMES, "X")] = "",
    error: Annotated[str, option("only with an error of this class", "X")] = "",
    filter: Annotated[
        str, option("only those on which this filter found something, whether it decided or only reported", "X")
    ] = "",
    reason: Annotated[str, option("only those that this filter left out", "X")] = "",
    trained: Annotated[str, option("yes or no", "X")] = "",
    group: Annotated[str, option("only of this group", "X")] = "",
    example: Annotated[str, option("only of this example", "X")] = "",
    grep: Annotated[
        str, option("only those with this text, in upper or lower case", "TEXT", allow_leading_hyphen=True)
    ] = "",
    where: Annotated[
        str,
        option("only those that meet a condition: \"reward > 0.8 and reply ~ 'x'\"", allow_leading_hyphen=True),
    ] = "",
    sort: Annotated[str, option("sort by a column; by default in recorded order", "COLUMN")] = "",
    asc: Annotated[bool, option("lowest first, which is the default", group=ORDER)] = False,
    desc: Annotated[bool, option("highest first", group=ORDER)] = False,
    limit: Annotated[Count, option("number of traces on a page")] = 40,
    page: Annotated[Count, option("number of the page")] = 1,
    columns: Annotated[str, option("these columns; reward:NAME and metric:NAME too", "A,B")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """List the rollouts of a step: filter, sort and search."""
    from flows.queries.request import BadQuestion
    from flows.queries.rollout_list import TraceChoice, read_names
    from flows.viewer.terminal.traces import main

    run, step = run_and_step(run, step, evaluation)
    if of_set is not None and evaluation is None:
        raise BadQuestion("--set chooses of an evaluation: name its policy's version with --evaluation")
    choice = TraceChoice(
        environment=env,
        agent=agent,
        outcome=outcome,
        error=error,
        filter=filter,
        reason=reason,
        trained=trained,
        group=group,
        example=example,
        search=grep,
        sort=sort,
        order="desc" if desc else "asc",
        page=page,
        size=limit,
        columns=read_names(columns),
    )
    return main(run, choice, step, evaluation, of_set, where, as_json=as_json, store=store)


def trace(
    id: Annotated[str, option("a rollout; see below", "ID")],
    /,
    *,
    run: Annotated[str, option("the run that uses it, `latest` for the newest")] = "",
    color: Annotated[str, option(COLOURS, "MEASURE")] = "",
    branch: Annotated[Index | None, option("only the messages of one branch", "K")] = None,
    messages: Annotated[str, option("only these messages, both included", "A:B")] = "",
    tokens: Annotated[bool, option("one line for each token, with all measurements", group=CONTENT)] = False,
    text: Annotated[bool, option("messages as texts, without tokens", group=CONTENT)] = False,
    whole: Annotated[bool, option("do not cut long texts")] = False,
    width: Annotated[Index | None, option("columns of the output")] = None,
    as_json: Annotated[bool, option("print everything as JSON for programs", name="--json", group=FORM)] = False,
    save: Annotated[str, option("write its page as one static HTML file", "FILE", group=FORM)] = "",
    force: Force = False,
    store: StoreOption = "",
) -> int | None:
    """Show a rollout: its outcome, its messages, its tokens."""
    from flows.viewer.terminal.trace import main
    from flows.viewer.terminal.trace_body import Wanted

    wanted = Wanted(color, branch, messages, tokens, text, whole)
    return main(id, wanted, store=store, run=run, width=width, as_json=as_json, save=save, force=force)

"""Commands that look at runs, rollouts, configs, machines and stores."""

from typing import Annotated, Literal

from flows.cli.arguments import (
    Count,
    Force,
    Index,
    Items,
    Json,
    Name,
    OfRun,
    Port,
    Positive,
    RunItems,
    StoreOption,
    one_of,
    one_run,
    option,
    run_and_step,
    split_items,
)


def show(
    *items: RunItems,
    name: Name = "",
    last: Annotated[Count, option("number of last steps to print")] = 10,
    timing: Annotated[bool, option("also the seconds of each stage")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Show a run: curves, last steps, held-out scores.

    With OVERRIDES, it lists the stages that they would run again.
    """
    from flows.cli.run_summary import main

    runs, overrides = split_items(items)
    run, step = run_and_step(one_run([name, *runs]))
    return main(run, overrides=overrides, store=store, as_json=as_json, last=last, timing=timing, step=step)


def runs(
    *,
    kind: Annotated[Literal["train", "sft", "evaluate", "replay"] | None, option("only runs of this kind")] = None,
    state: Annotated[str, option("only runs in this state, for example going, finished or failed")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """List the runs of a store: state, steps, rewards, age, size."""
    from flows.cli.run_list import list_runs

    return list_runs(store=store, kind=kind or "", state=state, as_json=as_json)


def status(
    run: Annotated[str, option("only this run, `latest` for the newest", "RUN")] = "",
    /,
    *,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Show what is running: runs, services, waiting gates, schedules.

    The exit status is 0 if a run is running, else 1.
    """
    from flows.cli.status import main

    return main(run, store=store, as_json=as_json)


def logs(
    run: Annotated[str, option("a run, `latest` for the newest", "RUN")] = "latest",
    service: Annotated[str, option("only this service: engine, learner, environment-NAME, ...", "SERVICE")] = "",
    /,
    *,
    lines: Annotated[Count, option("number of last lines of each service")] = 40,
    follow: Annotated[bool, option("print new lines as they come, until Ctrl-C")] = False,
    store: StoreOption = "",
) -> int | None:
    """Print what the services of a run wrote to their logs."""
    from flows.cli.run_list import show_logs

    return show_logs(run, service=service, lines=lines, follow=follow, store=store)


def check(
    *items: Items,
    name: Name = "",
    store: StoreOption = "",
    load: Annotated[bool, option("load each environment too, and check what it says of itself")] = False,
    gpu: Annotated[
        str, option("plan the memory of this GPU, such as H200 or 80GiB; this machine need not have it")
    ] = "",
    as_json: Annotated[bool, option("print the resolved config as JSON instead", name="--json")] = False,
) -> int | None:
    """Check a config and print the plan of its run; this starts nothing."""
    from flows.cli.plan import main
    from flows.runtime.prepare import assignments

    files, overrides = split_items(items)
    given = {key: value for key, value in (("name", name), ("store", store)) if value}
    return main(files, [*overrides, *assignments(given)], as_json=as_json, asks=load, gpu=gpu)


def config(
    *items: Annotated[
        str, option("a KEY (a setting or a section), FILES and OVERRIDES; see below", "[KEY] [FILES] [OVERRIDES]")
    ],
    as_json: Json = False,
) -> int | None:
    """Explain settings: meaning, value, and where the value came from."""
    from flows.cli.config import main

    names, overrides = split_items(items)
    return main(names, overrides, as_json=as_json)


def doctor(*, store: Annotated[str, option("store whose disk is checked")] = "") -> int | None:
    """Check whether this machine is ready, and print what to do if not."""
    from flows.cli.doctor import main

    return main(store=store)


def lora_smoke(
    *items: Annotated[str, option("FILES and OVERRIDES, model.path=DIR among them; see below", "[FILES] [OVERRIDES]")],
) -> int | None:
    """Test whether this machine's engine serves adapters correctly.

    It runs three probes over random adapters: base and adapter in one batch, swaps, slowdown. It stores nothing.
    """
    from flows.cli.lora_smoke import main

    return main(*split_items(items))


def gpu_smoke(
    *items: Annotated[str, option("model.path=DIR; see below", "[FILES] [OVERRIDES]")],
    tokens: Annotated[Count, option("tokens of the row that is trained")] = 4096,
    as_json: Json = False,
) -> int | None:
    """Test whether this machine's GPU trains and samples correctly.

    It prints what was measured beside what is expected. The exit status is 1 where something is wrong. Without
    `model.path` the model is a small random one. It stores nothing.
    """
    from flows.cli.gpu_smoke import main

    return main(*split_items(items), tokens=tokens, as_json=as_json)


def lineage(
    id: Annotated[str, option("see below", "ID")],
    /,
    *,
    up: Annotated[bool, option("only where it comes from")] = False,
    down: Annotated[bool, option("only what was made from it")] = False,
    kind: Annotated[str, option("the kind of ID, if it can mean several things")] = "",
    run: OfRun = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Show where a row comes from, and what was made from it."""
    from flows.cli.questions import lineage

    return lineage(id, up=up, down=down, as_json=as_json, store=store, run=run, kind=kind)


def why(
    trace: Annotated[str, option("a rollout; its id may be cut to eight characters", "TRACE")],
    /,
    *,
    run: OfRun = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Explain whether a rollout was trained on, and if not, why not."""
    from flows.cli.questions import why

    return why(trace, as_json=as_json, store=store, run=run)


def sql(
    query: Annotated[str, option("one SELECT statement; without it, the tables are listed")] = "",
    /,
    *,
    form: Annotated[Literal["table", "json", "csv", "parquet"] | None, option("output format", name="--format")] = None,
    output: Annotated[str, option("write the answer to a file instead of printing it", "FILE")] = "",
    tokens: Annotated[bool, option("include the columns with a value per token")] = False,
    force: Force = False,
    rows: Annotated[Count, option("maximum number of rows in the answer")] = 10_000_000,
    memory: Annotated[Positive, option("maximum memory, in GiB")] = 4.0,
    seconds: Annotated[Positive, option("maximum time, in seconds")] = 600.0,
    run: OfRun = "",
    store: StoreOption = "",
) -> int | None:
    """Query the tables of a store in SQL; this changes nothing.

    Ctrl-C ends a query.
    """
    from flows.cli.sql import sql
    from storage.read.query_limits import Bounds

    bounds = Bounds(rows, memory, seconds)
    return sql(query, form=form or "", output=output, tokens=tokens, store=store, run=run, force=force, bounds=bounds)


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

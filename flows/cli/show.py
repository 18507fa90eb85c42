"""Commands that look at runs, configs, machines and stores: show, check, doctor, lora-smoke, lineage, why, sql."""

from typing import Annotated, Literal

from flows.cli.arguments import (
    ITEMS_HELP,
    LOOK,
    Items,
    Json,
    Name,
    OfRun,
    RunItems,
    Store,
    app,
    one_run,
    option,
    split_items,
)

IDS = """\
ID is a policy (RUN, RUN:VERSION), a batch row (RUN:STEP:ROW, KEY/ROW), a rollout (TRACE), a training sample
(TRACE/BRANCH), an assignment (GROUP/MEMBER), an example (ENVIRONMENT/EXAMPLE), or any work by its KEY in the ledger.
Traces and keys may be cut to eight characters. An id that several runs use shows every branch, named by run.
"""
QUERY = """\
Tables go by name, each row once: select avg(reward) from traces where run = 'demo'
RUN.table are the rows that a run uses, also those that another run computed: select avg(reward) from "my-replay".traces
outcomes and accounting say what became of every rollout; uses says which run uses which slice, whoever computed it.
Without a query, the tables and their columns are listed.
"""


@app.command(group=LOOK, help_epilogue=ITEMS_HELP)
def show(*items: RunItems, name: Name = "", store: Store = "", as_json: Json = False) -> int | None:
    """A run at a glance, and what OVERRIDES would run again."""
    from flows.cli.run_summary import main

    runs, overrides = split_items(items)
    return main(one_run([name, *runs]), overrides=overrides, store=store, as_json=as_json)


@app.command(group=LOOK, help_epilogue=ITEMS_HELP)
def check(
    *items: Items,
    name: Name = "",
    store: Store = "",
    as_json: Annotated[bool, option("print the resolved config as JSON instead", name="--json")] = False,
) -> int | None:
    """Resolve and validate a config and print the plan; starts nothing."""
    from flows.cli.plan import main
    from flows.runtime.prepare import assignments

    files, overrides = split_items(items)
    given = {key: value for key, value in (("name", name), ("store", store)) if value}
    return main(files, [*overrides, *assignments(given)], as_json=as_json)


@app.command(group=LOOK)
def doctor(*, store: Annotated[str, option("store whose disk is looked at")] = "") -> int | None:
    """Is this machine ready, and what to do if not."""
    from flows.cli.doctor import main

    return main(store=store)


@app.command(group=LOOK, help_epilogue=ITEMS_HELP)
def lora_smoke(*items: Annotated[str, option("model.path=DIR; see below", "[FILES] [OVERRIDES]")]) -> int | None:
    """Does the engine here serve adapters right, and at what cost.

    Three probes over random adapters: base and adapter in one batch, swaps, slowdown. Keeps nothing.
    """
    from flows.cli.lora_smoke import main

    return main(*split_items(items))


@app.command(group=LOOK, help_epilogue=IDS)
def lineage(
    id: Annotated[str, option("see below", "ID")],
    /,
    *,
    up: Annotated[bool, option("only what it came from")] = False,
    down: Annotated[bool, option("only what came of it")] = False,
    kind: Annotated[str, option("what ID is, where it can be read in several ways")] = "",
    run: OfRun = "",
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """What a row came from and what came of it."""
    from flows.cli.lineage import main

    return main(id, up=up, down=down, as_json=as_json, store=store, run=run, kind=kind)


@app.command(group=LOOK)
def why(
    trace: Annotated[str, option("a rollout; its id may be cut to eight characters", "TRACE")],
    /,
    *,
    run: OfRun = "",
    store: Store = "",
    as_json: Json = False,
) -> int | None:
    """Was a rollout trained on, and if not, why not."""
    from flows.cli.why import main

    return main(trace, as_json=as_json, store=store, run=run)


@app.command(group=LOOK, help_epilogue=QUERY)
def sql(
    query: Annotated[str, option("one SELECT")] = "",
    /,
    *,
    form: Annotated[Literal["table", "json", "csv", "parquet"] | None, option("of the answer", name="--format")] = None,
    output: Annotated[str, option("write the answer there instead of printing it", "FILE")] = "",
    tokens: Annotated[bool, option("with the columns that hold a value per token")] = False,
    run: OfRun = "",
    store: Store = "",
) -> int | None:
    """Ask the tables of a store in SQL; nothing can be changed."""
    from flows.cli.sql import main

    return main(query, form=form or "", output=output, tokens=tokens, store=store, run=run)

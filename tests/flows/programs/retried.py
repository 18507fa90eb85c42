"""Stages that fail in a flow of an embedded Prefect, some for causes that pass; says how often each was called."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.run import RunConfig, View
from flows.orchestration import server as prefect_api
from storage.errors import StoreUnavailable
from storage.refs import Entry
from storage.store import open_store
from tasks.assignment import examples
from tasks.runtime import stage
from tasks.runtime.execute import perform
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref, Stage, Tables
from tests.fixtures import fixed
from tests.fixtures.rehearsal import SMALL

calls: Counter[str] = Counter()


def unanswered() -> StoreUnavailable:
    return StoreUnavailable("the store does not answer", "", "everything", "wait")


def failing(name: str, error: Exception, times: int) -> Stage:
    """A stage that fails so many times, then lists examples."""

    def function(tables: Tables, view: View) -> Tables:
        calls[name] += 1
        if calls[name] <= times:
            raise error
        return {"examples": fixed.examples()}

    return replace(examples.task.stage, name=name, function=function)


def unnamed_at_first(context: RunContext) -> None:
    """Let the first row of the ledger fail after the stage's rows are in their table."""
    commit, left = context.store.ledger.commit_all, [unanswered()]

    def once(entries: Sequence[Entry]) -> list[Entry]:
        if left:
            raise left.pop()
        return commit(entries)

    context.store.ledger.commit_all = once  # type: ignore[method-assign]


def done(stage: Stage, context: RunContext, step: int) -> Ref:
    return StageTask(stage)(step, partial(perform, stage, context, step))


def raised(context: RunContext, failed: Stage) -> str:
    """Return the name of the error that a stage fails with in the end."""
    try:
        done(failed, context, 1)
    except (ValueError, StoreUnavailable) as error:
        return type(error).__name__
    return ""


def main(directory: Path) -> None:
    said: dict[str, Any] = {}
    stage.RETRY_SECONDS = (0.1, 0.1)  # type: ignore[attr-defined]
    config = RunConfig.model_validate(SMALL | {"name": "a", "store": str(directory / "store")})
    context = RunContext(open_store(directory / "store"), "a", config, {})
    with prefect_api.prefect_api(directory / "prefect"):
        from prefect import flow

        def body() -> None:
            unnamed_at_first(context)
            done(failing("passes", unanswered(), times=1), context, 0)
            mended = raised(context, failing("stays", ValueError("the user has to mend this"), times=9))
            said["raised"] = {"stays": mended, "lasts": raised(context, failing("lasts", unanswered(), times=9))}

        flow(name="retried")(body)()
    store = open_store(directory / "store")
    written = store.slices.table("examples")
    said["calls"] = calls
    said["entries"] = [[entry.stage, entry.step] for entry in store.ledger.entries()]
    said["written"] = sum(written.read(each.path).num_rows for each in written.active_files())
    said["seen"] = store.scan("examples").collect().height
    said["rows"] = fixed.examples().num_rows
    print("SAID", json.dumps(said))


main(Path(sys.argv[1]))

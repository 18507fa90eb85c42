"""The command engines: the engines that have joined a run; lets one join or leave, or starts one here that joins."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flows.cli.arguments import Json, RunOrLatest, StoreOption, UsageError, one_of, option, stored_run
from flows.cli.output import print_report
from flows.reporting.formats import say

if TYPE_CHECKING:
    from configs.run import RunConfig
    from storage.store import Store

CHANGE = one_of()
LOOK_SECONDS = 1.0
"""Between two looks at an engine, or at the run that it leaves."""


def engines(
    run: RunOrLatest = "latest",
    /,
    *,
    join: Annotated[str, option("address of an engine that joins the run", "URL", group=CHANGE)] = "",
    leave: Annotated[str, option("address of an engine that leaves it", "URL", group=CHANGE)] = "",
    start: Annotated[bool, option("start an engine here that joins the run; Ctrl-C ends it", group=CHANGE)] = False,
    interface: Annotated[str, option("network interface on which a started one answers")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the engines that have joined a run, after one has joined or left.

    Raises RunUnknown, LayoutError without a store, UsageError for an address that cannot join or leave, ServiceFailed
    where an engine does not start.
    """
    from configs.secrets import holds_password
    from storage.records import JOIN, LEAVE
    from storage.store import open_store

    reader, name, config = stored_run(store, run)
    place, url = open_store(reader.store.root.address), (join or leave).rstrip("/")
    if (join or start) and not config.engine.is_elastic:
        raise UsageError(
            f"engine.replicas of {name} is {config.engine.replicas}, and engines join where it is a range; resume the "
            f"run with one, for example: stagecoach resume {name} engine.replicas=[1,4]"
        )
    if start:
        return _start(place, config, interface or config.placement.interface)
    joined = place.runs.joined_engines(name)
    if join and (holds_password(url) or not url.startswith(("http://", "https://"))):
        raise UsageError("--join: the address of an engine is http://HOST:PORT, without a password")
    if leave and url not in joined:
        raise UsageError(f"--leave {url}: no such engine has joined {name}; it has {', '.join(joined) or 'none'}")
    if url:
        place.runs.record(run=name, event=JOIN if join else LEAVE, message=url)
    joined = place.runs.joined_engines(name)
    print_report({"engines": joined}, as_json)
    if not (joined or as_json):
        say(f"no engine has joined {name}")
    return 0


def _start(store: "Store", config: "RunConfig", interface: str) -> int:
    """Start an engine here, let it join the run, and let it leave before it ends.

    The rollouts that it has are waited for, unless a second Ctrl-C ends it at once.
    """
    from configs.checks.run import model_config
    from flows.queries.run_state import deciding_event, is_going
    from flows.runtime.resolve_run import find_policy, source_of, whole_weights
    from flows.runtime.session import log_directory
    from flows.services.base import Supervisor
    from flows.services.engine import InferenceService
    from flows.services.pools import address_of
    from storage.records import JOIN, LEAVE, LEFT
    from tasks.runtime.process_variables import BIND
    from tasks.runtime.run_context import RunContext

    os.environ[BIND] = address_of(interface)
    run, runs = config.name, store.runs
    alone = config.engine.model_copy(update={"url": "", "replicas": (1, 1), "max_restarts": 0})
    context = RunContext(store, run, config.model_copy(update={"engine": alone, "store": store.root.address}), {})
    logs = log_directory(context.config) / f"engine-{os.getpid()}"
    with Supervisor(run, logs, on_pool=True) as supervisor:
        source = Path(source_of(config).weights)
        if model_config(str(source)).get("quantization_config") and (policy := find_policy(store, f"{run}:0")):
            source = whole_weights(store, policy.key)
        service = InferenceService(supervisor, context, source)
        service.check_available()
        service.begin()
        (engine,) = service.handles
        url = engine.wait()["url"]
        runs.record(run=run, event=JOIN, message=url)
        try:
            say(f"the engine at {url} joins {run}; Ctrl-C lets it leave")
            while engine.alive and runs.engine_events(run)[url] != LEFT:
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            say("it ends with its rollouts; a second Ctrl-C ends it at once")
            runs.record(run=run, event=LEAVE, message=url)
            while is_going(deciding_event(runs.events(run))) and runs.engine_events(run)[url] != LEFT:
                time.sleep(LOOK_SECONDS)
        engine.wait()  # raises, with the end of its log, where it has died
        say(f"the engine at {url} has left {run}")
    return 0

"""The process of one environment: serves its rollouts with its tool servers, or writes its examples.

Only this process, the workers of its pool and graders import the environment's package and verifiers' environments. So
verifiers is imported inside functions here, after errors of the import can be reported.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from tasks.inference.engine.host import write_report
from tasks.inference.environments.batched_calls import install_batched_calls
from tasks.inference.environments.examples import verifiers_config, write_examples
from tasks.inference.environments.introspection import settings_error
from tasks.inference.environments.packages import require_same_code
from tasks.inference.patches import load_tokenizers_from_cache
from tasks.inference.sampling.sealed import KEY_VARIABLE, seal_routers
from tasks.inference.sampling.seats import install_seat_assignment
from tasks.runtime.imports import look_in_working_directory
from tasks.runtime.process_variables import bind_address
from tasks.runtime.torchvision_operators import declare_torchvision_operators

CHECK_SECONDS = 2.0
"""Between two connections to a shared tool server, and the longest wait for one."""
MAX_REFUSALS = 3
"""Refused connections in a row after which a server is gone: a busy one accepts, or does not answer yet."""
RESEND_SECONDS = 0.1
"""Wait before a lost interrupt is sent again: by then the callback that lost it is over, or loses it once more."""
WORK_VARIABLE = "STAGECOACH_RUNTIMES"
LABELS_VARIABLE = "STAGECOACH_SANDBOX_LABELS"
LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve, or write examples; 3 where the environment cannot be loaded."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="file with the environment's section, as JSON")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--examples", type=Path)
    arguments = parser.parse_args(argv)
    set_up_process()
    environment = json.loads(arguments.config.read_text(encoding="utf-8"))
    try:
        # Here and not only where it is started: it is started again with the same arguments, whatever was edited since.
        require_same_code(environment)
        import verifiers.v1  # noqa: F401

        if arguments.examples is None:
            return serve(environment, arguments.report)
        facts = write_examples(environment, arguments.examples)
        write_report(arguments.report, {"facts": asdict(facts)})
    except Exception as error:
        return report_load_error(error, environment["name"], arguments.report, environment["taskset"].get("id", ""))
    return 0


def report_load_error(error: Exception, name: str, report: Path, taskset: str = "") -> int:
    """Write why an environment cannot be loaded to the log and to the report, where the parent reads it; return 3."""
    from pydantic import ValidationError

    logging.exception("environment %s cannot be loaded", name, exc_info=error)
    message = settings_error(error, taskset) if taskset and isinstance(error, ValidationError) else str(error)
    content = {"error": type(error).__name__, "message": message, "missing": missing_module(error)}
    write_report(report, content)
    return 3


def missing_module(error: BaseException) -> str | None:
    """Return the module whose absence caused an error; None where it had another cause.

    verifiers reports any failed import as a missing taskset, with the module that is really missing as the cause.
    """
    cause = missing_module(error.__cause__) if error.__cause__ else None
    return cause or (error.name if isinstance(error, ModuleNotFoundError) else None)


def serve(environment: Mapping[str, Any], report: Path) -> int:
    """Serve until SIGTERM; return the exit status, which is not 0 where a worker of a pool was lost."""
    from verifiers.v1.serve.pool import env_config_data, serve_env

    # A server that was killed left runtimes behind; the next one of this report takes the directory over, empty.
    work = report.with_name(f"{report.name}.runtimes")
    shutil.rmtree(work, ignore_errors=True)
    os.environ[WORK_VARIABLE] = str(work)
    os.environ[LABELS_VARIABLE] = json.dumps(environment["sandbox_labels"])
    config_data = env_config_data(verifiers_config(environment))

    def put(address: str) -> None:
        write_report(report, {"address": address, "pid": os.getpid()})

    # Taken out: the environment's code, and what that starts, need it not.
    if key := os.environ.pop(KEY_VARIABLE, ""):
        seal_routers(key)
    try:
        if max_workers(environment["pool"]) != 1:  # one worker needs no broker and is the server itself
            from tasks.inference.environments.pool import serve_pool

            cancel_on_sigterm()
            return serve_pool(environment, config_data, put, functools.partial(set_up_worker, environment))
        serve_env(
            max_workers=1,
            address=f"tcp://{bind_address()}:0",
            address_queue=SimpleNamespace(put=put),  # all that verifiers does with the queue
            log_setup=set_up_server,
            config_data=config_data,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def max_workers(pool: Mapping[str, Any]) -> int | None:
    """Return the largest number of worker processes of a pool; None where it has no bound."""
    number: int | None = pool["max_workers"] if pool["type"] == "elastic" else pool["num_workers"]
    return number


def set_up_process() -> None:
    """Set up the path of modules, logging to standard error, the directory of runtimes and sandbox labels.

    Servers and pool workers call it: a spawned worker starts without log handlers, and what it logs would be lost.
    """
    look_in_working_directory()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    # These log a line or more for every model call or rollout, whose trace says the same.
    for name in ("httpx", "aiohttp.access", "verifiers.v1.rollout"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if directory := os.environ.get(WORK_VARIABLE):
        import verifiers.v1.runtimes.subprocess as runtime

        runtime.CACHE_DIR = Path(directory)
    label_sandboxes()


def label_sandboxes() -> None:
    """Attach the labels of the environment's section to every sandbox that this process makes."""
    if labels := os.environ.get(LABELS_VARIABLE):
        from verifiers.v1.runtimes import set_base_sandbox_labels

        set_base_sandbox_labels(json.loads(labels))


def set_up_worker(environment: Mapping[str, Any]) -> None:
    """Set up a worker of a pool; raises EnvironmentUnavailable where its code was edited since the run began."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing yet to be brought to an end
    require_same_code(environment)  # an elastic pool starts workers at any time
    _set_up_serving()
    cancel_on_sigterm()


def set_up_server() -> None:
    """Set up a process that is the whole server. SIGTERM before the end of its imports ends it at once."""
    _set_up_serving()
    cancel_on_sigterm()


def _set_up_serving() -> None:
    """Patch verifiers for serving, and import what the first rollout would import in the event loop."""
    declare_torchvision_operators()  # renderers of models that see import a processor
    import renderers.client  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    from tasks.inference.environments.serving import install_rollout_server

    set_up_process()
    install_seat_assignment()
    install_rollout_server()
    install_batched_calls()
    load_tokenizers_from_cache()
    watch_shared_tools()


def watch_shared_tools() -> None:
    """Patch verifiers so that this process ends when one of its shared tool servers has ended.

    The supervisor then starts it again, tools included, and samples again what was in flight.
    """
    from verifiers.v1.env import Env

    serving = Env.serving

    @contextlib.asynccontextmanager
    async def serve_watched(self: Any) -> AsyncIterator[None]:
        async with serving(self):
            watching = [asyncio.create_task(end_without_server(*each)) for each in local_servers(self._shared_tools)]
            try:
                yield
            finally:
                for each in watching:
                    each.cancel()

    Env.serving = serve_watched


def local_servers(servers: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return name, host and port of the tool servers that this process started; external ones are not watched."""
    urls = [(name, urlsplit(each.url)) for name, each in servers.items() if each.local and not each.external]
    return [(name, url.hostname, url.port) for name, url in urls if url.hostname and url.port]


async def end_without_server(name: str, host: str, port: int) -> None:
    """Connect to a server every CHECK_SECONDS; end this process once it refused MAX_REFUSALS times in a row."""
    refusals = 0
    while refusals < MAX_REFUSALS:
        await asyncio.sleep(CHECK_SECONDS)
        refusals = refusals + 1 if await refuses(host, port) else 0
    _log.error("the shared tool server %r at %s:%d is gone: the environment server ends", name, host, port)
    os.kill(os.getpid(), signal.SIGTERM)


async def refuses(host: str, port: int) -> bool:
    """Tell whether no process listens there. A slow answer is no refusal: the server may be busy."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def cancel_on_sigterm() -> None:
    """Make the first SIGTERM act as an interrupt, which the event loop turns into a cancellation of its main task.

    Before the loop runs, the signal raises KeyboardInterrupt. Python prints and drops an exception that is raised in a
    callback of a weak reference, and imports run many of those: a dropped interrupt is sent again, and not printed.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the only handler that asyncio replaces by a cancellation
    signal.signal(signal.SIGTERM, _interrupt)
    before = sys.unraisablehook

    def resend_if_lost(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            before(dropped)
            return
        # Not by `threading`: the interrupted code may hold one of its locks.
        start_new_thread(_resend_interrupt, ())

    sys.unraisablehook = resend_if_lost


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by this `pool` knows that the whole server ends
    signal.raise_signal(signal.SIGINT)


def _resend_interrupt() -> None:
    time.sleep(RESEND_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

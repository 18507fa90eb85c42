"""The process of one environment: serves its rollouts with its tool servers, writes its examples, or grades traces.

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
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.inference import patches
from tasks.inference.engine.host import write_report
from tasks.inference.environments.agent_runs import play_episode
from tasks.inference.environments.examples import verifiers_config, write_examples
from tasks.inference.environments.introspection import settings_error
from tasks.inference.environments.packages import require_same_code
from tasks.inference.environments.servers import KEY_VARIABLE
from tasks.runtime.imports import look_in_working_directory
from tasks.runtime.process_variables import bind_address
from tasks.runtime.torchvision_operators import declare_torchvision_operators

CHECK_SECONDS = 2.0
"""Between two connections to a shared tool server, and the longest wait for one."""
MAX_REFUSALS = 3
"""Refused connections in a row after which a server is gone: a busy one accepts, or does not answer yet."""
MAX_REQUEST_BYTES = 64 * 2**20
"""Largest request of an agent, with its pictures; contexts of a million tokens are some 5 MB of JSON."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve, write examples or grade; return 3 where the environment cannot be loaded."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="file with the environment's section, as JSON")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--examples", type=Path, help="file to write examples to")
    parser.add_argument("--grade", choices=("rollouts", "groups"))
    arguments = parser.parse_args(argv)
    set_up_process()
    environment = json.loads(arguments.config.read_text(encoding="utf-8"))
    try:
        # Here and not only where it is started: it is started again with the same arguments, whatever was edited since.
        require_same_code(environment)
        import verifiers.v1  # noqa: F401

        if arguments.grade:
            from tasks.inference.grading.host import grade

            grade(environment, arguments.report, arguments.grade)
        elif arguments.examples:
            write_report(arguments.report, {"facts": asdict(write_examples(environment, arguments.examples))})
        else:
            return serve(environment, arguments.report)
    except Exception as error:
        from pydantic import ValidationError

        logging.exception("environment %s cannot be loaded", environment["name"])
        taskset = environment["taskset"]["id"]
        message = settings_error(error, taskset) if isinstance(error, ValidationError) else str(error)
        content = {"error": type(error).__name__, "message": message, "missing": missing_module(error)}
        write_report(arguments.report, content)
        return 3
    return 0


def missing_module(error: BaseException) -> str | None:
    """Return the module whose absence caused an error; None where it had another cause.

    verifiers reports any failed import as a missing taskset, with the module that is really missing as the cause.
    """
    cause = missing_module(error.__cause__) if error.__cause__ else None
    return cause or (error.name if isinstance(error, ModuleNotFoundError) else None)


def serve(environment: Mapping[str, Any], report: Path) -> int:
    """Serve until SIGTERM; return the exit status, which is not 0 where a worker of a pool was lost."""
    from verifiers.v1.serve.pool import env_config_data
    from verifiers.v1.serve.server import EnvServer

    from tasks.inference.environments.connections import seal_frontend

    # A server that was killed left runtimes behind; the next one of this report takes the directory over, empty.
    work = report.with_name(f"{report.name}.runtimes")
    shutil.rmtree(work, ignore_errors=True)
    config = verifiers_config(environment)

    def put(address: str) -> None:
        write_report(report, {"address": address, "pid": os.getpid()})

    # Taken out: the environment's code, and what that starts, need it not.
    key = os.environ.pop(KEY_VARIABLE, "")
    try:
        pool = environment["pool"]
        max_workers = pool["max_workers"] if pool["type"] == "elastic" else pool["num_workers"]
        if max_workers != 1:  # one worker needs no broker and is the server itself
            from tasks.inference.environments.pool import serve_pool

            set_up = functools.partial(set_up_worker, environment, work)
            return serve_pool(environment, max_workers, env_config_data(config), put, set_up, key)
        _set_up_serving(environment, work)
        server = EnvServer(config, "tcp://127.0.0.1:0" if key else f"tcp://{bind_address()}:0")
        if key:
            seal_frontend(server, key)
        put(server.address)
        with contextlib.suppress(asyncio.CancelledError):  # by SIGTERM while tool servers started
            asyncio.run(server.run())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def set_up_process() -> None:
    """Set up the path of modules and logging to standard error.

    Servers and pool workers call it: a spawned worker starts without log handlers, and what it logs would be lost.
    """
    look_in_working_directory()
    # Each model call in flight has a connection of its own.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    # These log a line or more for every model call or rollout, whose trace says the same.
    for name in ("httpx", "aiohttp.access", "verifiers.v1.rollout"):
        logging.getLogger(name).setLevel(logging.WARNING)


def set_up_runtimes(environment: Mapping[str, Any], work: Path) -> None:
    """Let runtimes of this process lie in the directory `work`, and its sandboxes have the labels of the section."""
    import verifiers.v1.runtimes.subprocess as runtime
    from verifiers.v1.runtimes import set_base_sandbox_labels

    runtime.CACHE_DIR = work
    set_base_sandbox_labels(environment["sandbox_labels"])


def set_up_worker(environment: Mapping[str, Any], work: Path) -> None:
    """Set up a worker of a pool; raises EnvironmentUnavailable where its code was edited since the run began."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until it serves there is nothing to be brought to an end
    require_same_code(environment)  # an elastic pool starts workers at any time
    _set_up_serving(environment, work)


def _set_up_serving(environment: Mapping[str, Any], work: Path) -> None:
    """Patch verifiers for serving, and import what the first rollout would import in the event loop."""
    declare_torchvision_operators()  # renderers of models that see import a processor
    import renderers.client  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    from tasks.inference.environments.model_client import resolve_seeded_client
    from tasks.inference.environments.responses_api import stream_events

    set_up_process()
    set_up_runtimes(environment, work)
    patches.play_episodes_with(play_episode)
    patches.call_models_with(resolve_seeded_client)
    patches.bound_requests_of_agents(MAX_REQUEST_BYTES)
    patches.stream_responses_with(stream_events)
    patches.load_tokenizers_from_cache()
    patches.watch_served_environments(cancel_on_sigterm, end_without_tools)


async def end_without_tools(tools: Mapping[str, Any]) -> None:
    """End this process when one of its shared tool servers has ended.

    The supervisor then starts it again, tools included, and samples again what was in flight.
    """
    await asyncio.gather(*(end_without_server(*server) for server in local_servers(tools)))


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
    """Have the first SIGTERM cancel the current task of the running event loop; later ones do nothing."""
    task = asyncio.current_task()
    assert task is not None, "called in a task"
    cancels = [task.cancel]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: cancels and cancels.pop()())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

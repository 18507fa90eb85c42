"""The process of one environment: serves it, or writes its examples.

`python -m tasks.inference.environment_host --config JSON --report PATH` serves it on a loopback port of the system's
choosing and writes `{"address": ...}` to the report file once it takes requests. With `--examples PATH` it loads the
taskset, writes its examples as an Arrow file and ends; a taskset that cannot be loaded leaves `{"error": ...}` in the
report file. Only this process imports the environment's package.
"""

import argparse
import functools
import importlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.inference.engine_host import write_report
from tasks.inference.environment_config import resolved
from tasks.inference.environment_examples import write_examples
from tasks.inference.seating import seat_players
from tasks.inference.shared_tools import watch_shared_tools
from tasks.inference.termination import end_when_told
from tasks.quick_imports import quick_imports

WORK_VARIABLE = "STAGECOACH_RUNTIMES"
LABELS_VARIABLE = "STAGECOACH_SANDBOX_LABELS"
LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def set_up_process() -> None:
    """Log to standard error and keep runtimes' directories in ours. Runs in the server and in every worker of its pool.

    A spawned worker starts without log handlers, and what it logs would be lost.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    for name in ("httpx", "aiohttp.access"):  # a line for every model call
        logging.getLogger(name).setLevel(logging.WARNING)
    if directory := os.environ.get(WORK_VARIABLE):
        import verifiers.v1.runtimes.subprocess as runtime

        runtime.CACHE_DIR = Path(directory)
    label_sandboxes()


def label_sandboxes() -> None:
    """Have every sandbox that this process makes carry the labels of its environment's section."""
    if labels := os.environ.get(LABELS_VARIABLE):
        from verifiers.v1.runtimes import set_base_sandbox_labels

        set_base_sandbox_labels(json.loads(labels))


def set_up_server() -> None:
    """Set up a process that serves, and load what its first rollout would otherwise wait for."""
    end_when_told()
    set_up_process()
    remember_signatures()
    seat_players()
    watch_shared_tools()
    threading.Thread(target=_load_renderers, name="load renderers", daemon=True).start()


def remember_signatures() -> None:
    """Let pydantic look at a default factory's signature once, instead of for every message: a tenth of a rollout.

    Models made without validation, as the messages of a trace are, ask each time whether the factory takes arguments.
    Where pydantic has no such function any more, nothing is changed.
    """
    from pydantic._internal import _fields

    name = "takes_validated_data_argument"
    if ask := getattr(_fields, name, None):
        setattr(_fields, name, functools.cache(ask))


def _load_renderers() -> None:
    with quick_imports():
        import renderers.client
        from transformers import AutoTokenizer

    logging.getLogger(__name__).debug("loaded %s and %s", renderers.client.__name__, AutoTokenizer.__name__)


def load_verifiers() -> None:
    """Load all that an environment is made of, quickly."""
    with quick_imports():
        importlib.import_module("verifiers.v1")


class Report:
    """Takes the server's address where verifiers would put it into a queue, and writes it to the report file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, address: str) -> None:
        """Write the address."""
        write_report(self.path, {"address": address, "pid": os.getpid()})


def serve(environment: Mapping[str, Any], report: Path) -> int:
    """Serve until told to end; return the exit status, which is not 0 where a worker of a pool was lost."""
    from verifiers.v1.serve.pool import env_config_data, serve_env

    work = report.with_name(f"{report.name}.runtimes")
    shutil.rmtree(work, ignore_errors=True)
    os.environ[WORK_VARIABLE] = str(work)
    os.environ[LABELS_VARIABLE] = json.dumps(environment["sandbox_labels"])
    config_data = env_config_data(resolved(environment))
    address = Report(report)
    try:
        if most_workers(environment["pool"]) != 1:
            from tasks.inference.environment_pool import serve_pool

            return serve_pool(environment, config_data, address.put, set_up_server)
        serve_env(
            max_workers=1,
            address="tcp://127.0.0.1:0",
            address_queue=address,
            log_setup=set_up_server,
            config_data=config_data,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def most_workers(pool: Mapping[str, Any]) -> int | None:
    """How many worker processes a pool may come to have; None where that has no bound."""
    most: int | None = pool["max_workers"] if pool["type"] == "elastic" else pool["num_workers"]
    return most


def main(argv: Sequence[str]) -> int:
    """Serve, or write examples; 3 where the environment cannot be loaded."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the environment's section of the config, as JSON")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--examples", type=Path)
    own = parser.parse_args(argv)
    set_up_process()
    environment = json.loads(own.config)
    try:
        load_verifiers()
        if own.examples is None:
            return serve(environment, own.report)
        write_examples(environment, own.examples)
    except Exception as error:
        # The border of this process: whoever started it reads the reason in the report.
        logging.exception("environment %s cannot be loaded", environment["name"])
        report = {"error": type(error).__name__, "message": str(error), "missing": missing_module(error)}
        write_report(own.report, report)
        return 3
    return 0


def missing_module(error: BaseException) -> str | None:
    """The module whose absence caused an error; None where it had another cause.

    verifiers reports any failed import as a taskset that is not there, with the module that is really missing behind.
    """
    behind = missing_module(error.__cause__) if error.__cause__ else None
    return behind or (error.name if isinstance(error, ModuleNotFoundError) else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The engine's process, which serves one model: `python -m tasks.inference.engine.host --report PATH [vLLM arguments]`.

It binds a free loopback port, hands the socket to vLLM's API server, and writes `{"url": ...}` to the report file as
soon as the server answers. Unknown arguments go to vLLM unchanged.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.inference import patches
from tasks.inference.engine.guard import KeyGuard
from tasks.inference.engine.read_back import FP8
from tasks.inference.engine.weights_view import serving_view
from tasks.runtime.process_variables import bind_address
from tasks.runtime.torchvision_operators import declare_torchvision_operators

POLL_SECONDS = 0.05
"""Between two tries to reach the server: short, as everything waits for the first answer."""
ENGINE_SEED_BITS = 31
"""numpy, which vLLM seeds too, takes 32."""


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON so that a reader sees all of it or no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def write_private(path: Path, content: str) -> None:
    """Write a file anew that this user alone can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a link, or have been made for all to read
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)


def bound_socket() -> socket.socket:
    """Return a socket on a free port of `bind_address`. vLLM gets it bound, so no other process can take the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind_address(), 0))
    # A forked engine process would keep the port open after this one died, and clients would not notice the loss.
    os.register_at_fork(after_in_child=listener.close)
    return listener


async def _serve(listener: socket.socket, arguments: argparse.Namespace, report: Path, captures_experts: bool) -> None:
    """Start the engine and its API server as vLLM's `run_server_worker` does, with our client of the engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.usage.usage_lib import UsageContext

    from tasks.inference.engine.token_policies import PolicyTrackingLLM

    url = "http://{}:{}".format(*listener.getsockname())
    options, usage = AsyncEngineArgs.from_cli_args(arguments), UsageContext.OPENAI_API_SERVER
    config = options.create_engine_config(usage_context=usage)
    if _is_cpu_build():
        # vLLM sets `spawn` while it builds its config, and to import everything again takes 9 to 17 seconds. The fork
        # is safe as no thread pool of torch exists yet.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    announcing = asyncio.create_task(_announce(url, report))
    engine = PolicyTrackingLLM.from_vllm_config(
        config,
        usage_context=usage,
        disable_log_stats=options.disable_log_stats,
        enable_log_requests=options.enable_log_requests,
        aggregate_engine_logging=options.aggregate_engine_logging,
    )
    try:
        if captures_experts:
            assert isinstance(engine, PolicyTrackingLLM)
            await engine.collective_rpc("capture_experts")
            engine.captures_experts = True
        await engine.reset_mm_cache()
        stopped = await build_and_serve(engine, url, listener, arguments)
    finally:
        announcing.cancel()  # the server may end before it ever answered
        engine.shutdown(timeout=config.shutdown_timeout)
    await stopped


async def _announce(url: str, report: Path) -> None:
    """Write the report once the server answers; until it listens, connections are refused."""
    import httpx
    from vllm.envs import enable_envs_cache

    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{url}/health", timeout=5)).status_code == 200:
                    enable_envs_cache()  # they are read several times for each request
                    return write_report(report, {"url": url, "pid": os.getpid()})
            except httpx.TransportError:
                await asyncio.sleep(POLL_SECONDS)


def _is_cpu_build() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def import_server() -> None:
    """Import vLLM's server, which takes seconds; `doctor` calls this as well."""
    declare_torchvision_operators()
    import uvloop  # noqa: F401
    from vllm.entrypoints.launchers.api_server import entry  # noqa: F401


def register_architectures(directory: str) -> None:
    """Register the classes of a model's architectures with vLLM; call it before the engine is created.

    vLLM inspects a class that is not registered in a separate process, `python -m vllm.model_executor.models.registry`.
    That process imports torchvision before it loads plugins, so no operators can be declared in it.
    """
    from vllm import ModelRegistry

    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    models = ModelRegistry.models
    # vLLM serves an architecture that it does not have by one of its classes around transformers' models.
    generic = (name for name in models if name.startswith("Transformers"))
    for name in models.keys() & {*config.get("architectures", ())} or generic:
        ModelRegistry.register_model(name, models[name].load_model_cls())


def register_gloo() -> None:
    """Register the weight transfer between CPUs with vLLM's factory, by which the forked workers have it, too."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    module = "tasks.inference.engine.gloo_transfer"
    WeightTransferEngineFactory.register_engine("gloo", module, "GlooWeightTransferEngine")


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--key-variable", default="", help="environment variable that holds the API key")
    parser.add_argument("--capture-experts", action="store_true", help="the CPU's way to return routed experts")
    own, rest = parser.parse_known_args(argv)
    # Requests without a seed draw from one generator. With vLLM's own seed, 0, each start and each replica would draw
    # the same numbers again.
    rest = ["--seed", str(secrets.randbits(ENGINE_SEED_BITS)), *rest]
    # By variable and not by argument: arguments are visible to every user of the machine.
    if key := os.environ.get(own.key_variable, ""):
        os.environ["VLLM_API_KEY"] = key
        rest += ["--middleware", f"{KeyGuard.__module__}.{KeyGuard.__name__}"]
    listener = bound_socket()

    import_server()
    import uvloop

    if FP8 in rest:
        from tasks.inference.engine import quantised  # noqa: F401 (registers it)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.system_utils import set_ulimit

    from tasks.inference.engine.routes import add_routes
    from tasks.inference.engine.token_policies import PolicyHeader

    rest += ["--middleware", f"{PolicyHeader.__module__}.{PolicyHeader.__name__}"]
    host, port = listener.getsockname()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*rest, "--host", host, "--port", str(port)])
    # A policy of a store has optimizer state beside its weights, which the engine would load as weights.
    with serving_view(arguments.model, own.report.parent) as weights:
        arguments.model = str(weights)
        validate_parsed_serve_args(arguments)
        add_routes()
        if _is_cpu_build():
            patches.keep_packed_checksums()
            patches.pack_experts_again()
            register_gloo()
            register_architectures(arguments.model)
            if arguments.enable_lora:
                patches.skip_absent_adapters()
        set_ulimit()  # each request in flight has a connection of its own
        uvloop.run(_serve(listener, arguments, own.report, own.capture_experts))


if __name__ == "__main__":
    main(sys.argv[1:])

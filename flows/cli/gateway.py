"""The command gateway: an address for agents that their owners start."""

import os
from pathlib import Path
from typing import Annotated

from flows.cli.arguments import Port, UsageError, option

KEY = "STAGECOACH_GATEWAY_KEY"
"""The environment variable with the key of those who may take rollouts."""


def gateway(
    directory: Path,
    /,
    *,
    host: Annotated[str, option("address to listen on; only this machine by default")] = "127.0.0.1",
    port: Annotated[Port, option("port to listen on")] = 8290,
) -> int:
    """Serve the rollouts of a directory until Ctrl-C. Raises UsageError where others could take them without a key."""
    from aiohttp import web

    from flows.services.gateway import Gateway
    from flows.viewer.serving import is_loopback

    key = os.environ.get(KEY, "")
    if not key and not is_loopback(host):
        raise UsageError(f"--host {host} is open to others: set {KEY} to a key that takes rollouts")
    print(f"Rollouts of {directory}: POST http://{host}:{port}/rollouts takes one. Ctrl-C ends it.", flush=True)
    web.run_app(Gateway(directory, key).application(), host=host, port=port, print=None)
    return 0

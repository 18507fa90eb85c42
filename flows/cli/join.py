"""The command join: processes of the learner on a further machine of a run, which join a learner when one starts."""

import os
import socket
import subprocess
import time
from typing import Annotated

from flows.cli.arguments import Items, option, split_items

PAUSE_SECONDS = 1.0
"""Between two looks whether a learner is there to be joined."""


def join(
    *items: Items, node: Annotated[int, option("number of this machine, from 1 on; 0 is the machine of the run", "N")]
) -> int:
    """Join the learner of a config each time that it starts; returns only by a signal.

    Raises ConfigError if the config has no such node.
    """
    from configs.errors import ConfigError
    from configs.load import load
    from flows.services.learner import NEEDS
    from tasks.learner.client import command
    from tasks.runtime.process_variables import inherited_variables

    learner = load(*split_items(items)).learner
    if not 0 < node < learner.nodes:
        raise ConfigError(
            f"--node {node}: learner.nodes is {learner.nodes}, and the run's own machine is node 0. Give the config of "
            "the run, and another number to each other machine"
        )
    argv, variables = command(learner, os.devnull, node)
    while True:
        print(f"node {node} of {learner.nodes}: waits for a learner at {learner.rendezvous}", flush=True)
        _wait_for(learner.rendezvous)
        print(f"node {node} of {learner.nodes}: joins it", flush=True)
        # They end when their standard input closes, so that none outlives this process however it ends.
        with subprocess.Popen(argv, env=inherited_variables(NEEDS) | variables, stdin=subprocess.PIPE) as processes:
            processes.wait()
        time.sleep(PAUSE_SECONDS)


def _wait_for(address: str) -> None:
    """Return when somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=PAUSE_SECONDS).close()
        except OSError:
            time.sleep(PAUSE_SECONDS)
        else:
            return

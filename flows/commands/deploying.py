"""Commands for a Prefect server: deploy."""

import argparse

from flows.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    deploy = add_command(
        commands, "deploy", _deploy, "put the deployments, their pool, limit and automation on the Prefect server"
    )
    deploy.add_argument("--pool", default="stagecoach", help="work pool; a machine or kind of machine has one")
    deploy.add_argument("--slots", type=int, default=1, help="runs with an engine or a learner at a time")
    deploy.add_argument("--file", default="", help="another file of deployments than deploy/prefect.yaml")


def _deploy(arguments: argparse.Namespace) -> int | None:
    from flows.orchestration.deployments import main as deploy

    return deploy(pool=arguments.pool, store=arguments.store, slots=arguments.slots, file=arguments.file)

"""Commands to look at rollouts: view (in a browser), traces and trace (on a terminal)."""

import argparse

from flows.commands.arguments import Commands, add_command

VIEW = """\
A page on 127.0.0.1, with no account and nothing loaded from elsewhere. It only reads. With another --host a token is
asked for: the address that is printed holds it, or STAGECOACH_VIEW_TOKEN names one.
"""


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    view = add_command(commands, "view", _view, "runs, rollouts and gradients in a browser; live, and only reading")
    view.epilog = VIEW
    view.formatter_class = argparse.RawDescriptionHelpFormatter
    view.add_argument("--run", default="", help="open this run, `latest` for the newest; else the list of runs")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on; only this machine by default")
    view.add_argument("--port", type=int, default=None, help="port to listen on; by default a free one from 8265 on")
    view.add_argument("--open", action="store_true", help="open a browser")


def _view(arguments: argparse.Namespace) -> int | None:
    from flows.viewer.serving import main as view

    given = arguments
    return view(store=given.store, run=given.run, host=given.host, port=given.port, browse=given.open)

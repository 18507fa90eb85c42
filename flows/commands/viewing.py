"""Commands to look at rollouts: view (in a browser), traces and trace (on a terminal)."""

import argparse

from flows.commands.arguments import Commands, add_command

VIEW = """\
A page on 127.0.0.1, with no account and nothing loaded from elsewhere. It only reads. With another --host a token is
asked for: the address that is printed holds it, or STAGECOACH_VIEW_TOKEN names one.
--save /runs/demo/steps/3 step3.html writes what an address shows as one static file, and starts nothing.
"""
COLOURS = """\
advantage, weight (the component of the loss), rl_weight, ce_weight, ref_kl_weight, trained_rl_weight, engine,
learner, ratio, mismatch, entropy, reference, signal, outside, mask, trained"""
FILTERS = {
    "env": "of this environment",
    "agent": "of this agent",
    "outcome": "trained, filtered, errored, stopped, quarantined, 'no weight', refused, pending, evaluated or expired",
    "error": "with an error of this class",
    "filter": "on which this filter found something, whether it decided or only reported",
    "reason": "that this filter decided against",
    "trained": "yes or no",
    "group": "of this group",
    "example": "of this example",
}
TRACES = """\
The same list as on the page of a step, with the same names of columns: fate, reward, advantage, num_turns, ...; an
unknown one lists them all. What has no value comes last. Into a pipe goes one line for each trace, with whole ids.
"""
TRACE = """\
ID is a rollout's; it may be cut to its first eight characters. Where several runs use it, --run says which is meant.
Sampled messages are drawn as tokens, coloured by --color; into a pipe, or with NO_COLOR, goes plain text.
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
    view.add_argument("--save", nargs=2, metavar=("ADDRESS", "FILE"), help="write a page to a file instead")
    _add_traces(commands)
    _add_trace(commands)


def _add_traces(commands: Commands) -> None:
    traces = add_command(commands, "traces", _traces, "the rollouts of a step on the terminal: filter, sort and search")
    traces.epilog = TRACES
    traces.formatter_class = argparse.RawDescriptionHelpFormatter
    traces.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run, `latest` for the newest")
    place = traces.add_mutually_exclusive_group()
    place.add_argument("--step", type=int, default=None, help="a step; by default the last one")
    place.add_argument("--evaluation", type=int, default=None, metavar="VERSION", help="an evaluation instead")
    traces.add_argument("--set", default=None, metavar="NAME", help="only this set of the evaluation")
    for name, text in FILTERS.items():
        traces.add_argument(f"--{name}", default="", metavar="X", help=text)
    traces.add_argument("--grep", default="", metavar="TEXT", help="those that hold a text, in upper or lower case")
    traces.add_argument("--sort", default="", metavar="COLUMN", help="by a column; by default as they came")
    order = traces.add_mutually_exclusive_group()
    order.add_argument("--asc", action="store_const", const="asc", dest="order", default="asc", help="the least first")
    order.add_argument("--desc", action="store_const", const="desc", dest="order", help="the greatest first")
    traces.add_argument("--limit", type=int, default=40, help="traces on a page")
    traces.add_argument("--page", type=int, default=1, help="which page")
    traces.add_argument("--columns", default="", metavar="A,B", help="these columns; reward:NAME and metric:NAME too")
    traces.add_argument("--json", action="store_true", help="for programs")


def _add_trace(commands: Commands) -> None:
    trace = add_command(commands, "trace", _trace, "a rollout on the terminal: its fate, its messages, its tokens")
    trace.epilog = TRACE
    trace.formatter_class = argparse.RawDescriptionHelpFormatter
    trace.add_argument("id", metavar="ID", help="a rollout; see below")
    trace.add_argument("--run", default="", help="as this run uses it, `latest` for the newest")
    trace.add_argument("--color", default="", metavar="MEASURE", help=f"by what tokens are coloured: {COLOURS}")
    trace.add_argument("--branch", type=int, default=None, metavar="K", help="only the messages of one branch")
    trace.add_argument("--messages", default="", metavar="A:B", help="only these messages, both included")
    drawn = trace.add_mutually_exclusive_group()
    drawn.add_argument("--tokens", action="store_true", help="a line for each token, with all that was measured of it")
    drawn.add_argument("--text", action="store_true", help="messages as they were said, without tokens")
    trace.add_argument("--whole", action="store_true", help="cut nothing, however long it is")
    trace.add_argument("--width", type=int, default=None, help="columns of the output")
    form = trace.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs: all of it")
    form.add_argument("--save", default="", metavar="FILE", help="write its page as one static HTML file instead")


def _view(arguments: argparse.Namespace) -> int | None:
    from flows.viewer.serving import main as view

    given = arguments
    if given.save:
        from flows.viewer.page import BadQuestion
        from flows.viewer.web.pages_to_files import main as save

        if given.run or given.open or given.port is not None:
            raise BadQuestion("--save writes one page and starts nothing: it goes without --run, --port and --open")
        address, file = given.save
        return save(address, file, store=given.store)
    return view(store=given.store, run=given.run, host=given.host, port=given.port, browse=given.open)


def _traces(arguments: argparse.Namespace) -> int | None:
    from flows.viewer.data.step_choice import Choice
    from flows.viewer.data.step_columns import read_names
    from flows.viewer.page import BadQuestion
    from flows.viewer.terminal.traces import main as traces

    given = arguments
    if given.set is not None and given.evaluation is None:
        raise BadQuestion("--set chooses of an evaluation: name its policy's version with --evaluation")
    filters = {name: getattr(given, name) for name in FILTERS if name != "env"}
    choice = Choice(
        **filters,
        environment=given.env,
        search=given.grep,
        sort=given.sort,
        order=given.order,
        page=given.page,
        size=given.limit,
        columns=read_names(given.columns),
    )
    return traces(given.run, choice, given.step, given.evaluation, given.set, as_json=given.json, store=given.store)


def _trace(arguments: argparse.Namespace) -> int | None:
    from flows.viewer.terminal.trace import Wanted
    from flows.viewer.terminal.trace import main as trace

    given = arguments
    wanted = Wanted(given.color, given.branch, given.messages, given.tokens, given.text, given.whole)
    return trace(
        given.id,
        wanted,
        store=given.store,
        run=given.run,
        width=given.width,
        as_json=given.json,
        save=given.save,
    )

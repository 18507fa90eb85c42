"""Commands that ask a store: lineage, why, sql."""

import argparse

from flows.commands.arguments import Command, Commands, add_command

IDS = """\
ID is a policy (RUN, RUN:VERSION), a batch row (RUN:STEP:ROW, KEY/ROW), a rollout (TRACE), a training sample
(TRACE/BRANCH), an assignment (GROUP/MEMBER), an example (ENVIRONMENT/EXAMPLE), or any work by its KEY in the ledger.
Traces and keys may be cut to eight characters. An id that several runs use shows every branch, named by run.
"""
QUERY = """\
Tables go by name, each row once: select avg(reward) from traces where run = 'demo'
RUN.table are the rows that a run uses, also those that another run computed: select avg(reward) from "my-replay".traces
fates and accounting say what became of every rollout; uses says which run uses which slice, whoever computed it.
Without a query, the tables and their columns are listed.
"""


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    lineage = _add(commands, "lineage", _lineage, "what a row came from and what came of it", IDS)
    lineage.add_argument("id", metavar="ID", help="see below")
    lineage.add_argument("--up", action="store_true", help="only what it came from")
    lineage.add_argument("--down", action="store_true", help="only what came of it")
    lineage.add_argument("--kind", default="", help="what ID is, where it can be read in several ways")
    lineage.add_argument("--json", action="store_true", help="for programs")
    why = _add(commands, "why", _why, "was a rollout trained on, and if not, why not", "")
    why.add_argument("trace", metavar="TRACE", help="a rollout; its id may be cut to eight characters")
    why.add_argument("--json", action="store_true", help="for programs")
    sql = _add(commands, "sql", _sql, "ask the tables of a store in SQL; nothing can be changed", QUERY)
    sql.add_argument("query", nargs="?", default="", help="one SELECT")
    sql.add_argument("--format", default="", choices=("table", "json", "csv", "parquet"), help="of the answer")
    sql.add_argument("--output", default="", metavar="FILE", help="write the answer there instead of printing it")
    sql.add_argument("--tokens", action="store_true", help="with the columns that hold a value per token")


def _add(commands: Commands, name: str, command: Command, text: str, epilog: str) -> argparse.ArgumentParser:
    parser = add_command(commands, name, command, text)
    parser.add_argument("--run", default="", help="only the rows that this run uses")
    parser.epilog = epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _lineage(arguments: argparse.Namespace) -> int | None:
    from flows.views.lineage import main as lineage

    given = arguments
    return lineage(
        given.id, up=given.up, down=given.down, as_json=given.json, store=given.store, run=given.run, kind=given.kind
    )


def _why(arguments: argparse.Namespace) -> int | None:
    from flows.views.why import main as why

    return why(arguments.trace, as_json=arguments.json, store=arguments.store, run=arguments.run)


def _sql(arguments: argparse.Namespace) -> int | None:
    from flows.views.sql import main as sql

    given = arguments
    return sql(
        given.query, form=given.format, output=given.output, tokens=given.tokens, store=given.store, run=given.run
    )

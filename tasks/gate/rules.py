"""Rules: a condition in SQL over the figures of a batch, such as `trainable_ratio > 0.1 and reward_mean is not null`.

A condition that comes out as null does not hold: what is not known lets nothing through.
"""

import re
from typing import TYPE_CHECKING

import pyarrow as pa

from configs.errors import ConfigError
from tasks.metrics.figures import MEANINGS, Figures, in_words

if TYPE_CHECKING:
    import duckdb  # a tenth of a second to import, for runs that have a rule

SEALED = {"enable_external_access": False, "lock_configuration": True, "threads": 1}
"""A rule sees the figures and nothing else: no files, no network."""
COUNTS = tuple(name for name in MEANINGS if name.startswith("num_"))


class RuleFailed(ValueError):
    """A rule that was fine by itself could not be worked out over the figures of a batch."""


def require_rule(rule: str) -> None:
    """Raise ConfigError unless `rule` is one condition in SQL over the figures."""
    import duckdb

    try:
        with duckdb.connect(":memory:", config=SEALED) as connection:
            problem = _problem(connection, rule)
    except duckdb.Error as error:
        problem = _first_line(error)
    if problem:
        names = ", ".join(MEANINGS)
        raise ConfigError([f"gate.rule: {rule!r}: {problem}; a rule is a condition in SQL over: {names}"])


def holds(rule: str, figures: Figures) -> bool:
    """Tell whether a rule is true of the figures; false and null are not. Raises RuleFailed where SQL fails on them."""
    import duckdb

    try:
        with duckdb.connect(":memory:", config=SEALED) as connection:
            ((found,),) = _asked(connection, rule, figures).fetchall()
    except (duckdb.Error, ValueError) as error:
        raise RuleFailed(
            f"gate.rule: {rule!r} cannot be worked out over {described(rule, figures)}: {_first_line(error)}. Nothing "
            f"was trained on this batch; everything up to it is safe. Correct the rule and resume (gate.rule=...)."
        ) from error
    return found is True


def described(rule: str, figures: Figures) -> str:
    """Return the figures that a rule names, for a message; all of them where it names none."""
    words = set(re.findall(r"\w+", rule.lower()))
    return in_words({name: value for name, value in figures.items() if name in words} or figures)


def _problem(connection: "duckdb.DuckDBPyConnection", rule: str) -> str:
    """Return what is wrong with a rule; empty where it is one condition. Unknown names raise duckdb.Error."""
    if len(connection.extract_statements(_query(rule))) != 1:
        return "this is more than one statement"
    asked = _asked(connection, rule, dict.fromkeys(MEANINGS))
    (found,) = (str(each) for each in asked.types)
    if found != "BOOLEAN":
        return f"this is a value of type {found}, which is neither true nor false"
    return "" if len(asked.fetchall()) == 1 else "this is more than one value"


def _asked(connection: "duckdb.DuckDBPyConnection", rule: str, figures: Figures) -> "duckdb.DuckDBPyRelation":
    fields = [pa.field(name, pa.int64() if name in COUNTS else pa.float64()) for name in MEANINGS]
    connection.register("batch", pa.Table.from_pylist([dict(figures)], pa.schema(fields)))
    return connection.sql(_query(rule))


def _query(rule: str) -> str:
    return f"SELECT ({rule}\n) FROM batch"  # a rule that ends in a comment must not take the bracket with it


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

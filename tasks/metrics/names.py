"""Names of metrics: a measure in a scope, and how both are written as one name."""

import pyarrow as pa

ALL = "all"
"""The scope of all environments together."""
Values = dict[tuple[str, str], float]
"""Values by scope (an environment, `all`, or empty) and measure (`reward/mean`)."""


def metric_values(rows: pa.Table) -> Values:
    """Return the rows of table `metrics` of one step by scope and measure."""
    columns = [rows[name].to_pylist() for name in ("scope", "name", "value")]
    return {(scope, name): value for scope, name, value in zip(*columns, strict=True)}


def full_name(scope: str, measure: str) -> str:
    """Return the name of a measure in a scope: `reward/mean` of `all` is `reward/all/mean`."""
    if not scope:
        return measure
    head, _, rest = measure.partition("/")
    return "/".join(filter(None, (head, scope, rest)))

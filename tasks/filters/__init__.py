"""The filters by the `type` of their config section: one small file each, one line here."""

from tasks.filters.custom import custom
from tasks.filters.errored import errored
from tasks.filters.finding import Filter, Finding, Material
from tasks.filters.gibberish import gibberish
from tasks.filters.incomplete_group import incomplete_group
from tasks.filters.parse_error import parse_error
from tasks.filters.repetition import repetition
from tasks.filters.truncated import truncated
from tasks.filters.zero_advantage import zero_advantage

FILTERS = {
    "errored": Filter(errored),
    "truncated": Filter(truncated),
    "zero_advantage": Filter(zero_advantage, of_groups=True),
    "gibberish": Filter(gibberish),
    "repetition": Filter(repetition),
    "parse_error": Filter(parse_error),
    "incomplete_group": Filter(incomplete_group, of_groups=True),
    "custom": Filter(custom),
}

__all__ = ["FILTERS", "Filter", "Finding", "Material"]

"""The filters by the `type` of their config section: one small file each, one line here."""

from tasks.arrays.finding import Filter
from tasks.filtering.filters.custom import custom
from tasks.filtering.filters.errored import errored
from tasks.filtering.filters.gibberish import gibberish
from tasks.filtering.filters.incomplete_group import incomplete_group
from tasks.filtering.filters.parse_error import parse_error
from tasks.filtering.filters.repetition import repetition
from tasks.filtering.filters.truncated import truncated
from tasks.filtering.filters.zero_advantage import zero_advantage

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

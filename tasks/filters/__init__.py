"""The filters by the `type` of their config section: one small file each, one line here."""

from tasks.filters.errored import errored
from tasks.filters.finding import Filter, Finding, Material
from tasks.filters.gibberish import gibberish
from tasks.filters.repetition import repetition
from tasks.filters.truncated import truncated
from tasks.filters.zero_advantage import zero_advantage

FILTERS = {
    "errored": Filter(errored),
    "truncated": Filter(truncated),
    "zero_advantage": Filter(zero_advantage, of_groups=True),
    "gibberish": Filter(gibberish),
    "repetition": Filter(repetition),
}

__all__ = ["FILTERS", "Filter", "Finding", "Material"]

"""The section of the filtering stage: the filters, distinguished by `type`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.fields import Section, later, operational, section_types, version_of


class FilterSection(Section):
    """What every filter's section says of it."""

    type: str
    enforce: bool = False
    """Whether what is found is left out of training, or only recorded."""


class ErroredFilter(FilterSection):
    type: Literal["errored"] = "errored"
    enforce: Literal[True] = True
    """Errored traces are in no baseline, whatever one would wish."""


class TruncatedFilter(FilterSection):
    type: Literal["truncated"] = "truncated"


class ZeroAdvantageFilter(FilterSection):
    type: Literal["zero_advantage"] = "zero_advantage"
    enforce: bool = True
    tolerance: float = Field(1e-9, ge=0)
    """Largest spread of rewards in a group that counts as none."""


class GibberishFilter(FilterSection):
    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100_000, ge=0)
    """Token ids above this are rare in a vocabulary sorted by frequency of merges."""
    logprob_offset: float = 2.0
    """A rare token counts when its log-prob is below -log(vocabulary size) minus this, in nats."""


class RepetitionFilter(FilterSection):
    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Shortest run of near-certain sampled tokens that counts as a loop, over all messages of a branch."""
    probability: float = Field(0.99, gt=0, lt=1)
    """A token is near certain when its log-prob is above the log of this."""


class ParseErrorFilter(FilterSection):
    """Finds rollouts with a turn that the environment could not read; that turn is never trained on, whatever this
    filter does with the rest."""

    type: Literal["parse_error"] = "parse_error"
    enforce: bool = False
    """Whether the whole rollout is left out of training, or only recorded."""


class IncompleteGroupFilter(FilterSection):
    """Finds groups of which a member failed or was not scored; for environments that score a group as one."""

    type: Literal["incomplete_group"] = "incomplete_group"
    enforce: bool = True


class CustomFilter(FilterSection):
    """Finds what a function of one's own finds."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    """What verdicts and metrics call it."""
    function: str = Field(min_length=1)
    """Import path, `package.module:function`, looked for where Python looks and in the current working directory. It is
    called with the rows (`FilterInput`) and `arguments`; returns evidence by row of the traces."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments, plain values."""
    of_groups: bool = False
    """Whether it compares the members of a group, so that it looks at what the other filters left standing."""
    version: str = version_of("function")
    """Name and version of its package, or the digest of its file; filled in when resolved."""
    in_parts: bool = later(False)
    """Whether it may be called with a part of a large batch at a time, each with whole groups. Otherwise all messages
    of the batch are held in memory."""


FilterConfig = Annotated[
    ErroredFilter
    | TruncatedFilter
    | ZeroAdvantageFilter
    | GibberishFilter
    | RepetitionFilter
    | ParseErrorFilter
    | IncompleteGroupFilter
    | CustomFilter,
    Field(discriminator="type"),
]


class FilteringConfig(Section):
    filters: tuple[FilterConfig, ...] = (
        ErroredFilter(),
        TruncatedFilter(),
        ZeroAdvantageFilter(),
        GibberishFilter(),
        RepetitionFilter(),
    )
    """The filters, in the order in which a verdict names its reason."""
    max_batch_attempts: int = operational(3, ge=1, le=1000)
    """Batches sampled for one step before the run gives up because none holds a kept trace."""


RESERVED_NAMES = {kind.model_fields["type"].default for kind in section_types(FilterConfig)} | {
    *("quarantined", "untrainable", "no_turns", "judge", "other_seat", "is_filtered"),
}
"""Names that a custom filter may not have: those of the others, reasons that no filter gives, and a metric's."""


def filter_name(settings: FilterConfig) -> str:
    """Return what verdicts and metrics call a filter: its type, or the name that a custom one was given."""
    return settings.name if isinstance(settings, CustomFilter) else settings.type

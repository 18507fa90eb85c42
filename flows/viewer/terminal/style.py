"""What a trace looks like on a terminal: what is printed of it, colours of tokens, indented texts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from flows.viewer.svg.colours import STEPS, diverging, sequential

COMPONENTS = {"rl_weight": "rl", "ce_weight": "ce", "ref_kl_weight": "ref-kl"}


@dataclass(frozen=True)
class Wanted:
    """What of a trace is printed."""

    colour: str = ""
    """Of `MEASURES`; empty for the one that says most, as on the page of a trace."""
    branch: int | None = None
    span: str = ""
    """Numbers of messages, both included: 4, 3:7, 3:, :7; all of them where it is empty."""
    tokens: bool = False
    """One line for each token, with everything that was measured of it."""
    text: bool = False
    """Messages as texts, not as tokens."""
    whole: bool = False
    """Nothing is cut."""


@dataclass(frozen=True)
class Measure:
    """What tokens can be coloured by."""

    title: str
    column: str
    """Of `data.tokens.TOKENS`; empty for the components of the loss, which are three."""
    scale: str
    """around (zero), up (from `low`), down (to 0, the faintest), named (yes, or the component)."""
    least: float = 0.0
    """The smallest reach of the scale, so that noise is not drawn as if it were large."""


MEASURES = {
    "advantage": Measure("advantage, where it has rl weight", "advantage", "around"),
    "weight": Measure("component of the loss that weighs it", "", "named"),
    "rl_weight": Measure("rl weight", "rl_weight", "up", 1.0),
    "ce_weight": Measure("cross-entropy weight", "ce_weight", "up", 1.0),
    "ref_kl_weight": Measure("reference-KL weight", "ref_kl_weight", "up", 1.0),
    "trained_rl_weight": Measure("rl weight as trained", "trained_rl_weight", "up"),
    "engine": Measure("log-prob of the engine that sampled it", "engine_logprob", "down", 1.0),
    "learner": Measure("log-prob of the learner before the update", "learner_logprob", "down", 1.0),
    "ratio": Measure("log importance ratio, learner less engine", "log_ratio", "around", 0.02),
    "mismatch": Measure("mismatch, r - 1 - log r", "mismatch", "up", 1e-4),
    "entropy": Measure("entropy of the learner, nats", "entropy", "up", 1.0),
    "reference": Measure("log-prob of the frozen reference", "reference_logprob", "down", 1.0),
    "signal": Measure("the reference's log-prob less the engine's", "signal", "around", 0.02),
    "outside": Measure("no gradient of its surrogate (trust region, clipping)", "outside", "named"),
    "mask": Measure("sampled by the policy", "sampled", "named"),
    "trained": Measure("trained on", "trained", "named"),
}
"""By the names that the page of a trace has for them too; `weight` is of the terminal alone."""

_GROUNDS = {
    "n4": "#c2410c", "n3": "#f0803c", "n2": "#ffb487", "n1": "#ffdcc6", "0": "#c9ced6",
    "p1": "#d5e3ff", "p2": "#a3c2ff", "p3": "#6a9bf5", "p4": "#1d4fc4",
    "0of4": "#f3e8f6", "1of4": "#e0c4ea", "2of4": "#c795d8", "3of4": "#9a50b5", "4of4": "#6b2184",
    "rl": "#a3c2ff", "ce": "#a9dfb3", "ref-kl": "#f0d982", "several": "#e0c4ea", "yes": "#a3c2ff",
}  # fmt: skip
_DARK = ("n4", "p4", "3of4", "4of4")
_STYLES = {name: Style(color="#ffffff" if name in _DARK else "#16181c", bgcolor=at) for name, at in _GROUNDS.items()}
_NOTHING = Style()


class Colours:
    """The colours of one trace's tokens by one measure; the scale reaches as far as the tokens given do."""

    def __init__(self, name: str, tokens: pl.DataFrame, largest: float | None = None) -> None:
        """`largest` is the size of the largest advantage of the step: colours of its traces are then the same."""
        self.measure = MEASURES[name]
        values = tokens[self.measure.column] if self.measure.scale in ("around", "up", "down") else None
        sizes = [abs(value) for value in values.drop_nulls() if math.isfinite(value)] if values is not None else []
        known = [largest] if name == "advantage" and largest else []
        self.reach = max([self.measure.least, *sizes, *known])
        self.any = bool(sizes) or values is None

    def of(self, token: Mapping[str, Any]) -> Style:
        """Return the style of a token, a row of `data.tokens.tokens`; nothing where it has no value."""
        return _STYLES.get(self.step(token), _NOTHING)

    def legend(self) -> Text:
        """Return what the colours mean, on a line."""
        text = Text(f"{self.measure.title}: ")
        for place, (step, said) in enumerate(self._steps()):
            text.append(" " if place and said else "").append(f" {said} " if said else "  ", _STYLES[step])
        none = "no colour: it has none" if self.any else "no token has a value"
        return text.append(f"  {none}", "dim")

    def step(self, token: Mapping[str, Any]) -> str:
        """Return the step of colour of a token; `none` where it has no value."""
        if not self.measure.column:
            found = [name for column, name in COMPONENTS.items() if token[column]]
            return found[0] if len(found) == 1 else "several" if found else "none"
        value = token[self.measure.column]
        if self.measure.scale == "named":
            return "yes" if value else "none"
        if self.measure.scale == "around":
            return diverging(value, self.reach)
        upward = value if self.measure.scale == "up" or value is None else self.reach + value
        level = sequential(upward, 0.0, self.reach)
        return level if level == "none" else f"{level}of{STEPS}"

    def _steps(self) -> Sequence[tuple[str, str]]:
        """Return the steps of colour, with what is said of them."""
        if not self.measure.column:
            return [(name, name) for name in (*COMPONENTS.values(), "several")]
        if self.measure.scale == "named":
            return [("yes", "yes")]
        if self.measure.scale == "around":
            sides = [f"n{step}" for step in range(STEPS, 0, -1)], [f"p{step}" for step in range(1, STEPS + 1)]
            ends = {"n4": f"{-self.reach:.3g}", "p4": f"{self.reach:+.3g}"}
            return [(step, ends.get(step, "")) for step in (*sides[0], "0", *sides[1])]
        low, high = (0.0, self.reach) if self.measure.scale == "up" else (-self.reach, 0.0)
        ends = {"0of4": f"{low:.3g}", "4of4": f"{high:.3g}"}
        return [(f"{step}of4", ends.get(f"{step}of4", "")) for step in range(STEPS + 1)]


LEAST = 8
"""Columns that a text gets however narrow the terminal is."""
LONG = 100_000
"""Characters from which on lines are broken wherever they are full, and without colours: wrapping takes minutes."""


@dataclass(frozen=True)
class Indented:
    """A text that stands some columns to the right."""

    text: Text
    columns: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        width, before = max(options.max_width - self.columns, LEAST), " " * self.columns
        if len(self.text) > LONG:
            for plain in self.text.plain.expandtabs(8).split("\n"):
                most = width if plain.isascii() else width // 2  # a character takes two columns at most
                for start in range(0, max(len(plain), 1), most):
                    yield Segment(f"{before}{plain[start : start + most]}".rstrip() + "\n")
            return
        for line in self.text.wrap(console, width, overflow="fold"):
            line.rstrip()
            yield Text(before).append_text(line) if line else Text("")

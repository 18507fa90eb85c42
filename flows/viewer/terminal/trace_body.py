"""The body of a trace on a terminal: its messages with sampled tokens in colour, or its tokens as a list.

The colours come first: what tokens can be coloured by, and the style of each step of colour.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from flows.queries.messages import Images, Line, link_calls, read_message, reading, rejected_messages
from flows.queries.rollouts import largest_advantage
from flows.queries.shown_tokens import default_colouring, scaled_weights
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import tokenizer, tokens, with_texts
from flows.queries.trace import FoundTrace
from flows.reporting.formats import DASH, cut, number, one_line, visible
from flows.reporting.svg import COLOUR_STEPS, diverging, sequential

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
    """Of `flows.queries.tokens.TOKENS`; empty for the components of the loss, which are three."""
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
    "policy": Measure("versions from its policy to the newest of the rollout", "policy_age", "up", 1.0),
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
        # One scale for all traces of a step, so that they can be compared; of other measures its own tokens decide.
        known = [largest] if name == "advantage" and largest else []
        self.reach = max([self.measure.least, *sizes, *known])
        self.any = bool(sizes) or values is None

    def of(self, token: Mapping[str, Any]) -> Style:
        """Return the style of a token, a row of `flows.queries.tokens.tokens`; nothing where it has no value."""
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
        return level if level == "none" else f"{level}of{COLOUR_STEPS}"

    def _steps(self) -> Sequence[tuple[str, str]]:
        """Return the steps of colour, with what is said of them."""
        if not self.measure.column:
            return [(name, name) for name in (*COMPONENTS.values(), "several")]
        if self.measure.scale == "named":
            return [("yes", "yes")]
        if self.measure.scale == "around":
            sides = (
                [f"n{step}" for step in range(COLOUR_STEPS, 0, -1)],
                [f"p{step}" for step in range(1, COLOUR_STEPS + 1)],
            )
            ends = {"n4": f"{-self.reach:.3g}", "p4": f"{self.reach:+.3g}"}
            return [(step, ends.get(step, "")) for step in (*sides[0], "0", *sides[1])]
        low, high = (0.0, self.reach) if self.measure.scale == "up" else (-self.reach, 0.0)
        ends = {"0of4": f"{low:.3g}", "4of4": f"{high:.3g}"}
        return [(f"{step}of4", ends.get(f"{step}of4", "")) for step in range(COLOUR_STEPS + 1)]


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


MOST_MESSAGES = 40
"""Messages that are printed; of more, the first and the last half of these."""
MOST_CHARACTERS = 2000
MOST_MESSAGE_TOKENS = 600
"""Characters and tokens of one message that are printed."""
ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def conversation(
    library: StoreReader, found: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, wanted: Wanted, out: Console
) -> Iterator[RenderableType]:
    """Yield the messages `own` of a trace, which has the messages `rows`, in the order of reading.

    Tokens are drawn where there are colours to draw them in, and a tokenizer; else the texts as they were said.
    """
    read = reading(rows, wanted.branch)
    wished = set(own["message"])
    lines = [line for line in read.lines if line.message in wished]
    shown, gap = _lines_to_print(lines, wanted.whole)
    # No images: a terminal shows none, and reading them would be most of the work.
    messages = {row["message"]: read_message(row, Images([])) for row in _rows(rows, [line.message for line in shown])}
    link_calls(list(messages.values()))
    drawn: dict[int, list[dict[str, Any]]] = {}
    if read.broken:
        yield Text(visible(f"\n{read.broken}"), "red")
    if out.color_system and not wanted.text:
        scale, drawn, why = _drawn_tokens(library, found, [line.message for line in shown], wanted.colour)
        yield Text("\n").append_text(scale.legend() if not why else Text(f"{visible(why)}: texts, not tokens", "dim"))
    dropped = set(rejected_messages(found, rows)) if not read.broken else set()
    for place, line in enumerate(shown):
        if gap and place == gap:
            yield Text(f"\n... {len(lines) - len(shown)} messages between these (--messages A:B, --whole)", "dim")
        yield from _message(messages[line.message], line, line.message in dropped, len(read.paths) > 1)
        if line.message in drawn:
            yield Indented(_colour_tokens(drawn[line.message], scale, wanted.whole))
        else:
            yield from _texts(messages[line.message], wanted.whole)


def _lines_to_print(lines: Sequence[Line], whole: bool) -> tuple[Sequence[Line], int]:
    """Return the lines that are printed, and before which of them some are left out; 0 for nowhere."""
    if whole or len(lines) <= MOST_MESSAGES:
        return lines, 0
    # A rollout is understood by its task, at the begin, and by its result, at the end.
    half = MOST_MESSAGES // 2
    return [*lines[:half], *lines[-half:]], half


def _rows(rows: pl.DataFrame, numbers: Sequence[int]) -> list[dict[str, Any]]:
    return rows.filter(pl.col("message").is_in(numbers)).to_dicts()


def _drawn_tokens(
    library: StoreReader, found: FoundTrace, numbers: Sequence[int], colour: str
) -> tuple[Colours, dict[int, list[dict[str, Any]]], str]:
    """Return the scale of colours, the tokens of the messages of which any was sampled or weighed, and why none are."""
    own = tokens(library, found, numbers)
    scale = Colours(colour or default_colouring(own), own, largest_advantage(library, found))
    texts, why = tokenizer(library, found)
    if texts is None:
        return scale, {}, why
    # Of what was neither sampled nor weighed no token says anything: it is read as a text.
    counts = pl.any_horizontal("sampled", *(pl.col(name).fill_null(0) != 0 for name in COMPONENTS))
    drawn = own.filter(counts.any().over("message"))
    drawn = drawn if "text" in drawn.columns else with_texts(library, found, drawn)
    parts = drawn.partition_by("message", as_dict=True, maintain_order=True)
    return scale, {int(number): part.to_dicts() for (number,), part in parts.items()}, ""


def _message(message: dict[str, Any], line: Line, dropped: bool, several: bool) -> Iterator[Text]:
    """Yield the heading of a message."""
    text = Text("\n").append(f"{message['message']:>3} ", "dim")
    role = one_line(message["role"], 40)
    text.append(role, f"bold {ROLES.get(message['role'], 'cyan')}")
    if message["name"]:
        text.append(f" {one_line(message['name'], 60)}")
    sampled = f", {message['num_sampled']} sampled" if message["sampled"] else ""
    text.append(f"  {message['num_tokens']} tokens{sampled}", "dim")
    if several:
        text.append(f"  branch {line.branch}", "cyan")
    if line.goes_on_from is not None:
        after = "another beginning" if line.goes_on_from < 0 else f"goes on from message {line.goes_on_from}"
        text.append(f"  {after}", "cyan")
    if message["asked"]:
        text.append(f"  answers the call of message {message['asked']['message']}", "dim")
    if dropped:
        text.append("  thrown away by the environment", "red")
    yield text


def _colour_tokens(own: Sequence[dict[str, Any]], scale: Colours, whole: bool) -> Text:
    """Return the tokens of a message in colour; the marks of the template are faint where they have none."""
    shown = own if whole else own[:MOST_MESSAGE_TOKENS]
    text, broken = Text(), False
    for token in shown:
        style = scale.of(token)
        said = visible(token["text"] or "")
        if not style and (token["special"] or token["is_content"] is False):
            text.append(said.replace("\n", "⏎"), "dim")
            broken = broken or "\n" in said
        else:
            # Marks of the template stay on one line; what they stand around begins a new one.
            text.append("\n" if broken else "").append(said.replace("\n", "⏎\n"), style)
            broken = False
    text.rstrip()
    if len(own) > len(shown):
        text.append(f"\n... {len(own) - len(shown)} more tokens (--whole shows all)", "dim")
    return text


def _texts(message: dict[str, Any], whole: bool) -> Iterator[RenderableType]:
    """Yield what a message says, piece by piece."""
    if message["thoughts"]:
        yield Indented(text_cut(message["thoughts"]["text"], whole, "thinks: ", "italic"))
    for part in message["parts"]:
        said = Text("[an image: the page shows it]", "dim") if part["kind"] == "image" else None
        yield Indented(said or text_cut(part["text"]["text"], whole))
    for call in message["calls"]:
        name = one_line(call["name"] or "a call without a name", 80)
        yield Indented(text_cut(call["arguments"]["text"], whole, f"calls {name} "))
    if message["rest"]:
        yield Indented(text_cut(message["rest"]["text"], whole, "also: ", "dim"))


def text_cut(text: str, whole: bool, label: str = "", style: str = "", most: int = MOST_CHARACTERS) -> Text:
    """Return a text of others behind a label, cut with a count of what is left out unless the whole is wanted."""
    shown, left_out = (text, 0) if whole else cut(text, most)
    found = Text().append(label, "yellow").append(visible(shown), style)
    return found.append(f"\n... {left_out} more characters (--whole shows all)", "dim") if left_out else found


MOST_LISTED_TOKENS = 400
"""Tokens that are printed; of more, the first."""
NUMBER, TEXT, VALUE = 7, 22, 10
"""Columns of a terminal for a number that says where, for a token's text, for a value."""
COLUMNS = {
    "advantage": "advantage",
    "rl_weight": "rl",
    "trained_rl_weight": "rl-train",
    "ce_weight": "ce",
    "trained_ce_weight": "ce-train",
    "ref_kl_weight": "ref-kl",
    "trained_ref_kl_weight": "kl-train",
    "engine_logprob": "engine",
    "learner_logprob": "learner",
    "log_ratio": "log ratio",
    "mismatch": "mismatch",
    "entropy": "entropy",
    "reference_logprob": "reference",
    "signal": "signal",
    "outside": "outside",
    "trained": "trained",
}
"""Columns of the list of tokens and their headings; a column is shown where any token has a value."""


def token_list(
    library: StoreReader, found: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, wanted: Wanted, out: Console
) -> Iterator[RenderableType]:
    """Yield the tokens of the messages `own` as a table; columns in which no token has a value are left out."""
    read = tokens(library, found, own["message"].to_list())
    read = read if "text" in read.columns else with_texts(library, found, read)
    colour = wanted.colour or default_colouring(read)
    scale = Colours(colour, read, largest_advantage(library, found))
    shown = read if wanted.whole else read.head(MOST_LISTED_TOKENS)
    # False sorts before True: the column that colours the tokens comes first, and is never left out.
    every = sorted((name for name in COLUMNS if _says_something(read, name)), key=MEASURES[colour].column.__ne__)
    room = max(1, (out.width - len(_columns(("", "", ""), "", ()))) // VALUE)
    known = every[:room]
    if out.color_system:
        yield Text("\n").append_text(scale.legend())
    yield Text(_columns(("message", "place", "id"), "token", [COLUMNS[name] for name in known]), "dim", no_wrap=True)
    for token in shown.iter_rows(named=True):
        yield _token_line(token, known, scale)
    if every[room:]:
        left_out = ", ".join(COLUMNS[name] for name in every[room:])
        yield Text(f"No room for {left_out} (--width {out.width + VALUE * len(every[room:])}, --json)", "dim")
    if len(read) > len(shown):
        yield Text(f"... {len(read) - len(shown)} more tokens (--messages A:B, --whole)", "dim")


def _says_something(tokens: pl.DataFrame, name: str) -> bool:
    """Say whether any token has a value; weights that are all zero are those of a component without members.

    Those that were trained say something where they are others than those of the credit.
    """
    if name.startswith("trained_"):
        return name.removeprefix("trained_") in scaled_weights(tokens)
    values = tokens[name].drop_nulls()
    return len(values) > 0 and (not name.endswith("_weight") or bool((values != 0).any()))


def _token_line(token: dict[str, Any], known: Sequence[str], scale: Colours) -> Text:
    """Return the line of a token; its text alone is coloured."""
    text = DASH if token["text"] is None else one_line(token["text"], TEXT)
    numbers = [str(token[name]) for name in ("message", "place", "token_id")]
    line = Text(_columns(numbers, text, [_value(token[name]) for name in known]), no_wrap=True, overflow="ignore")
    start = len(_columns(numbers, "", ()).rstrip()) + 2
    line.stylize(scale.of(token), start, start + len(text))
    return line


def _columns(numbers: Sequence[str], text: str, values: Sequence[str]) -> str:
    """Return a line of columns; wide characters keep them under each other."""
    before = "".join(f"{each:>{NUMBER}}" for each in numbers)
    return f"{before}  {set_cell_size(text, TEXT)}{''.join(f'{each:>{VALUE}}' for each in values)}"


def _value(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)

"""A rollout on a terminal: its head, its messages with sampled tokens in colour, or its tokens as a list.

Called by the command trace. The colours are the shades of the page of a trace (flows.queries.shown_tokens).
"""

import json
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
from flows.queries.notes import note_line
from flows.queries.sentences import sentence
from flows.queries.shown_tokens import (
    COLOURINGS,
    NONE,
    Colouring,
    default_colouring,
    largest_in_batch,
    scaled_weights,
)
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import token_policies, tokenizer, tokens, with_texts
from flows.queries.trace import FoundTrace, other_runs, outcome_of
from flows.reporting.formats import DASH, cut, number, one_line, seconds, visible
from flows.viewer import addresses

_NAMES = ("advantage", "weight", "engine", "learner", "ratio", "mismatch", "entropy", "reference")
COMPONENTS = {"rl_weight": "rl", "ce_weight": "ce", "ref_kl_weight": "ref-kl"}


@dataclass(frozen=True)
class PrintOptions:
    """The parts of a trace to print."""

    colour: str = ""
    """A name of `MEASURES`; empty for the measure that says most."""
    branch: int | None = None
    span: str = ""
    """Numbers of messages, both included: 4, 3:7, 3:, :7; all of them where it is empty."""
    tokens: bool = False
    """One line for each token, with all its measurements."""
    text: bool = False
    """Messages as texts, not as tokens."""
    whole: bool = False
    """Nothing is cut."""


_COMPONENT = pl.concat_str(
    pl.when(pl.col(name).fill_null(0) != 0).then(pl.lit(letter)).otherwise(pl.lit(""))
    for name, letter in zip(COMPONENTS, "rwk", strict=True)
)
_WEIGHT = Colouring(
    "weight",
    "component of the loss",
    "The component of the loss that weighs the token.",
    "rl_weight",
    "rwkm",
    (*COMPONENTS.values(), "several"),
    category=pl.when(_COMPONENT.str.len_chars() > 1).then(pl.lit("m")).when(_COMPONENT != "").then(_COMPONENT),
)
MEASURES = {colouring.name: colouring for colouring in (_WEIGHT, *COLOURINGS) if colouring.name in _NAMES}
"""What tokens can be coloured by: colourings of the page of a trace, and `weight`, which only the terminal has."""
_GROUNDS = {
    "d": "#ffdcc6", "c": "#ffb487", "b": "#f0803c", "a": "#c2410c", "o": "#c9ced6",
    "e": "#d5e3ff", "f": "#a3c2ff", "g": "#6a9bf5", "h": "#1d4fc4",
    "A": "#f3e8f6", "B": "#ead6f0", "C": "#e0c4ea", "D": "#d4ade1", "E": "#c795d8", "F": "#b173c8", "G": "#9a50b5",
    "H": "#6b2184", "r": "#a3c2ff", "w": "#a9dfb3", "k": "#f0d982", "m": "#e0c4ea",
}  # fmt: skip
_STYLES = {
    letter: Style(color="#ffffff" if letter in "ahGH" else "#16181c", bgcolor=ground)
    for letter, ground in _GROUNDS.items()
}


class Colours:
    """The colours of one trace's tokens by one measure, in the shades of its page."""

    def __init__(self, name: str, tokens: pl.DataFrame, largest: float) -> None:
        """`largest` is the size of the measure that has the deepest shade."""
        self.measure, self._largest = MEASURES[name], largest
        self._letters = self.measure.shades(tokens, largest)

    def paint(self, tokens: pl.DataFrame) -> pl.DataFrame:
        """Return the tokens with the column `shade`, a letter of the legend or `-`."""
        return tokens.with_columns(shade=pl.Series(list(self._letters), dtype=pl.String))

    def legend(self) -> Text:
        """Return the shades with their meanings as a line."""
        text = Text(f"{self.measure.label}:")
        for letter, label in self.measure.legend(self._largest):
            text.append(" ").append(f" {label} ", _STYLES[letter])
        measured = self._letters.strip(NONE)
        return text.append(f"  no colour: {'it has none' if measured else 'no token has a value'}", "dim")


def style_of(token: Mapping[str, Any]) -> Style:
    """Return the style of a token that has a shade."""
    return _STYLES.get(token["shade"], Style.null())


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
    library: StoreReader, found: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, options: PrintOptions, out: Console
) -> Iterator[RenderableType]:
    """Yield the messages `own` of a trace, which has the messages `rows`, in the order of reading.

    Tokens are drawn where there are colours to draw them in, and a tokenizer; else the texts as they were said.
    """
    read = reading(rows, options.branch)
    wished = set(own["message"])
    lines = [line for line in read.lines if line.message in wished]
    shown, gap = _lines_to_print(lines, options.whole)
    # No images: a terminal shows none, and reading them would be most of the work.
    messages = {row["message"]: read_message(row, Images([])) for row in _rows(rows, [line.message for line in shown])}
    link_calls(list(messages.values()))
    drawn: dict[int, list[dict[str, Any]]] = {}
    if read.broken:
        yield Text(visible(f"\n{read.broken}"), "red")
    if out.color_system and not options.text:
        colours, drawn, why = _drawn_tokens(library, found, [line.message for line in shown], options.colour)
        yield Text("\n").append_text(colours.legend() if not why else Text(f"{visible(why)}: texts, not tokens", "dim"))
    dropped = set(rejected_messages(found, rows)) if not read.broken else set()
    for place, line in enumerate(shown):
        if gap and place == gap:
            yield Text(f"\n... {len(lines) - len(shown)} messages between these (--messages A:B, --whole)", "dim")
        yield from _message(messages[line.message], line, line.message in dropped, len(read.paths) > 1)
        if line.message in drawn:
            yield Indented(_colour_tokens(drawn[line.message], options.whole))
        else:
            yield from _texts(messages[line.message], options.whole)


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
    """Return the colours, the tokens of messages with a sampled or weighed token, and why there are none."""
    own = tokens(library, found, numbers)
    colours = _colours(library, found, own, colour)
    texts, why = tokenizer(library, found)
    if texts is None:
        return colours, {}, why
    # Of what was neither sampled nor weighed no token says anything: it is read as a text.
    counts = pl.any_horizontal("sampled", *(pl.col(name).fill_null(0) != 0 for name in COMPONENTS))
    drawn = colours.paint(own).filter(counts.any().over("message"))
    drawn = drawn if "text" in drawn.columns else with_texts(library, found, drawn)
    parts = drawn.partition_by("message", as_dict=True, maintain_order=True)
    return colours, {int(number): part.to_dicts() for (number,), part in parts.items()}, ""


def _colours(library: StoreReader, found: FoundTrace, own: pl.DataFrame, name: str) -> Colours:
    name = name or default_colouring(own)
    name = name if name in MEASURES else "weight"
    return Colours(name, own, largest_in_batch(library, found, own, MEASURES[name].column))


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


def _colour_tokens(own: Sequence[dict[str, Any]], whole: bool) -> Text:
    """Return the tokens of a message in colour; the marks of the template are faint where they have none."""
    shown = own if whole else own[:MOST_MESSAGE_TOKENS]
    text, broken = Text(), False
    for token in shown:
        style = style_of(token)
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
    """Return a text of others behind a label, cut with a count of what is left out unless the whole is options."""
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
    library: StoreReader, found: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, options: PrintOptions, out: Console
) -> Iterator[RenderableType]:
    """Yield the tokens of the messages `own` as a table; columns in which no token has a value are left out."""
    read = tokens(library, found, own["message"].to_list())
    read = read if "text" in read.columns else with_texts(library, found, read)
    colours = _colours(library, found, read, options.colour)
    read = colours.paint(read)
    shown = read if options.whole else read.head(MOST_LISTED_TOKENS)
    # False sorts before True: the column that colours the tokens comes first, and is never left out.
    every = sorted((name for name in COLUMNS if _says_something(read, name)), key=colours.measure.column.__ne__)
    room = max(1, (out.width - len(_columns(("", "", ""), "", ()))) // VALUE)
    known = every[:room]
    if out.color_system:
        yield Text("\n").append_text(colours.legend())
    yield Text(_columns(("message", "place", "id"), "token", [COLUMNS[name] for name in known]), "dim", no_wrap=True)
    for token in shown.iter_rows(named=True):
        yield _token_line(token, known)
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


def _token_line(token: dict[str, Any], known: Sequence[str]) -> Text:
    """Return the line of a token; its text alone is coloured."""
    text = DASH if token["text"] is None else one_line(token["text"], TEXT)
    numbers = [str(token[name]) for name in ("message", "place", "token_id")]
    line = Text(_columns(numbers, text, [_value(token[name]) for name in known]), no_wrap=True, overflow="ignore")
    start = len(_columns(numbers, "", ()).rstrip()) + 2
    line.stylize(style_of(token), start, start + len(text))
    return line


def _columns(numbers: Sequence[str], text: str, values: Sequence[str]) -> str:
    """Return a line of columns; wide characters keep them under each other."""
    before = "".join(f"{each:>{NUMBER}}" for each in numbers)
    return f"{before}  {set_cell_size(text, TEXT)}{''.join(f'{each:>{VALUE}}' for each in values)}"


def _value(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)


TRACEBACK = 4000
"""Characters of a traceback that are shown, from its end, where the error is."""
LINE = 200
SPANS = ("setup", "generation", "model", "scoring")


def head(library: StoreReader, found: FoundTrace, rows: pl.DataFrame, whole: bool) -> Iterator[RenderableType]:
    """Yield the head of a trace; `rows` are its messages, and with `whole` nothing is cut."""
    row, outcome = found.row, outcome_of(library, found)
    yield Text.assemble((f"trace {one_line(found.trace_id, LINE)}", "bold"), "  ", _outcome(outcome))
    yield _line(
        ("run", found.run), ("step", found.step), ("environment", row["environment"]), ("example", row["example_id"]),
        ("agent", row["agent"]), ("policy", _policies(library, found)), ("temperature", number(row["temperature"])),
    )  # fmt: skip
    yield _line(
        ("messages", len(rows)), ("branches", row["num_branches"]), ("turns", row["num_turns"]),
        ("tokens in", row["num_input_tokens"]), ("sampled", row["num_output_tokens"]),
        ("ended by", row["stop_condition"]), ("truncated", "yes" if row["is_truncated"] else "no"),
    )  # fmt: skip
    yield _line(*((f"{name}", seconds(row[f"{name}_seconds"])) for name in SPANS))
    yield _rewards(row)
    yield Text(visible(sentence({"trace": row}, outcome)))
    for each in outcome["quarantines"]:
        yield Text(visible(f"It is in quarantine {each['quarantine']}: {each['reason']} (where {each['where']})."))
    for each in outcome["notes"]:
        yield Text(visible(note_line(each)))
    if others := other_runs(found):
        yield Text(visible(f"Also used by {', '.join(others)}: --run shows it as they have it."), "dim")
    yield Text(f"Page: {visible(addresses.trace(found.run, found.trace_id, found.key))}", "dim")
    yield from _error(row, whole)


def _policies(library: StoreReader, found: FoundTrace) -> str:
    """Return the version of the policy that sampled a trace, of several each with its number of tokens."""
    counts = token_policies(library, found).group_by("policy_version").agg(pl.col("num_tokens").sum())
    versions = [f"{version} ({count} tokens)" for version, count in counts.sort("policy_version").iter_rows()]
    return ", ".join(versions) or str(found.row["policy_version"])


def _outcome(outcome: Mapping[str, Any]) -> Text:
    style = {"trained": "green", "evaluated": "cyan", "pending": "cyan", "errored": "red"}.get(
        outcome["outcome"], "yellow"
    )
    detail = f": {one_line(outcome['detail'], LINE)}" if outcome["detail"] else ""
    return Text(f"{outcome['outcome']}{detail}", style)


def _line(*pairs: tuple[str, Any]) -> Text:
    """Return names with their values on a line; a value that is not there is a dash."""
    text = Text()
    for place, (name, value) in enumerate(pairs):
        text.append("   " if place else "").append(f"{name} ", "dim")
        text.append("\u2013" if value is None else one_line(str(value), LINE))
    return text


def _rewards(row: Mapping[str, Any]) -> Text:
    """Return the reward with the parts that it is the sum of; not scored is not zero."""
    text = Text.assemble(("reward ", "dim"), (number(row["reward"], 4), "bold"))
    for place, (name, part) in enumerate(_object(row["rewards"]).items()):
        text.append(" = " if not place else " + ", "dim").append(one_line(name, 60)).append(" ")
        if isinstance(part, dict):
            text.append(f"{_figure(part.get('score'))} x {_figure(part.get('weight'))}")
        else:
            text.append("not scored")
    for name, value in _object(row["metrics"]).items():
        text.append("   ").append(f"{one_line(name, 60)} ", "dim").append(_figure(value))
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _figure(value: Any) -> str:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return number(value, 4)
    return one_line(str(value), 60)


def _error(row: Mapping[str, Any], whole: bool) -> Iterator[RenderableType]:
    if not row["error_class"]:
        return
    kind = f"{row['error_class']} error{': ' + row['error_type'] if row['error_type'] else ''}"
    yield Text(f"\n{one_line(kind, LINE)}", "bold red")
    if row["error_message"]:
        yield Indented(text_cut(row["error_message"], whole, most=TRACEBACK), 2)
    if row["error_traceback"]:
        text = row["error_traceback"]
        shown = text if whole else text[-TRACEBACK:]
        left_out = len(text) - len(shown)
        note = f"... {left_out} characters before this (--whole shows all)\n" if left_out else ""
        yield Indented(Text.assemble((note, "dim"), visible(shown)), 2)

"""A rollout on a terminal: its head, its messages with sampled tokens in colour, or its tokens as a list.

Called by the command trace. The colours are the shades of the page of a trace (flows.queries.shown_tokens).
"""

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
from flows.queries.reader import reward_parts
from flows.queries.request import parse_object
from flows.queries.sentences import sentence
from flows.queries.shown_tokens import (
    COLOURINGS,
    NONE,
    default_colouring,
    largest_in_batch,
    scaled_weights,
)
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import token_policies, tokenizer, tokens, with_texts
from flows.queries.trace import FoundTrace, other_runs, outcome_of
from flows.reporting.formats import DASH, cut, number, one_line, seconds, visible
from flows.viewer import addresses

WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight")
Token = Mapping[str, Any]


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


MEASURES = {colouring.name: colouring for colouring in COLOURINGS}
"""What tokens can be coloured by: the colourings of the page of a trace."""
_GROUNDS = {
    "d": "#ffdcc6", "c": "#ffb487", "b": "#f0803c", "a": "#c2410c", "o": "#c9ced6",
    "e": "#d5e3ff", "f": "#a3c2ff", "g": "#6a9bf5", "h": "#1d4fc4",
    "A": "#f3e8f6", "B": "#ead6f0", "C": "#e0c4ea", "D": "#d4ade1", "E": "#c795d8", "F": "#b173c8", "G": "#9a50b5",
    "H": "#6b2184", "x": "#f0803c", "i": "#d5e3ff", "y": "#a3c2ff", "n": "#c9ced6", "s": "#a3c2ff", "p": "#a9dfb3",
    "t": "#e3e6ea", "u": "#c9ced6",
}  # fmt: skip
STYLES = {
    letter: Style(color="#ffffff" if letter in "ahGH" else "#16181c", bgcolor=ground)
    for letter, ground in _GROUNDS.items()
}


def shade_tokens(
    reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame, name: str
) -> tuple[pl.DataFrame, str, Text]:
    """Return tokens with `shade` (a letter of STYLES or `-`), the column that colours them, and the legend."""
    measure = MEASURES[name or default_colouring(rows)]
    largest = largest_in_batch(reader, trace, rows, measure.column)
    letters = measure.shades(rows, largest)
    legend = Text(f"\n{measure.label}:")
    for letter, label in measure.legend(largest):
        legend.append(" ").append(f" {label} ", STYLES[letter])
    none = "it has none" if letters.strip(NONE) else "no token has a value"
    legend.append(f"  no colour: {none}", "dim")
    return rows.with_columns(shade=pl.Series(list(letters), dtype=pl.String)), measure.column, legend


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
    reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, options: PrintOptions, out: Console
) -> Iterator[RenderableType]:
    """Yield the messages `own` of a trace, which has the messages `rows`, in the order of reading.

    Tokens are drawn where there are colours to draw them in, and a tokenizer; else the texts as they were said.
    """
    view, requested = reading(rows, options.branch), set(own["message"])
    lines = [line for line in view.lines if line.message in requested]
    # A rollout is understood by its task, at the begin, and by its result, at the end.
    half = MOST_MESSAGES // 2
    gap = half if len(lines) > MOST_MESSAGES and not options.whole else 0
    shown = [*lines[:half], *lines[-half:]] if gap else lines
    numbers = [line.message for line in shown]
    # No images: a terminal shows none, and reading them would be most of the work.
    chosen = rows.filter(pl.col("message").is_in(numbers)).to_dicts()
    messages = {row["message"]: read_message(row, Images([])) for row in chosen}
    link_calls(list(messages.values()))
    if view.broken:
        yield Text(visible(f"\n{view.broken}"), "red")
    drawn: dict[int, list[Token]] = {}
    if out.color_system and not options.text:
        drawn, legend = _drawn_tokens(reader, trace, numbers, options.colour)
        yield legend
    rejected = set(rejected_messages(trace, rows)) if not view.broken else set()
    for place, line in enumerate(shown):
        message = messages[line.message]
        if gap and place == gap:
            yield Text(f"\n... {len(lines) - len(shown)} messages between these (--messages A:B, --whole)", "dim")
        yield _heading(message, line, line.message in rejected, len(view.paths) > 1)
        if line.message in drawn:
            yield Indented(_colour_tokens(drawn[line.message], options.whole))
        else:
            yield from map(Indented, _texts(message, options.whole))


def _drawn_tokens(
    reader: StoreReader, trace: FoundTrace, numbers: Sequence[int], colour: str
) -> tuple[dict[int, list[Token]], Text]:
    """Return the tokens of messages with a sampled or weighed token, and the legend or why there are none."""
    rows, _, legend = shade_tokens(reader, trace, tokens(reader, trace, numbers), colour)
    texts, why = tokenizer(reader, trace)
    if texts is None:
        return {}, Text(f"\n{visible(why)}: texts, not tokens", "dim")
    # Of what was neither sampled nor weighed no token says anything: it is read as a text.
    counts = pl.any_horizontal("sampled", *(pl.col(name).fill_null(0) != 0 for name in WEIGHTS))
    drawn = _with_texts(reader, trace, rows.filter(counts.any().over("message")))
    parts = drawn.partition_by("message", as_dict=True, maintain_order=True)
    return {int(number): list[Token](part.to_dicts()) for (number,), part in parts.items()}, legend


def _with_texts(reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame) -> pl.DataFrame:
    return rows if "text" in rows.columns else with_texts(reader, trace, rows)


def _heading(message: Mapping[str, Any], line: Line, rejected: bool, has_branches: bool) -> Text:
    text = Text("\n").append(f"{message['message']:>3} ", "dim")
    text.append(one_line(message["role"], 40), f"bold {ROLES.get(message['role'], 'cyan')}")
    if message["name"]:
        text.append(f" {one_line(message['name'], 60)}")
    sampled = f", {message['num_sampled']} sampled" if message["sampled"] else ""
    text.append(f"  {message['num_tokens']} tokens{sampled}", "dim")
    if has_branches:
        text.append(f"  branch {line.branch}", "cyan")
    if line.goes_on_from is not None:
        after = "another beginning" if line.goes_on_from < 0 else f"goes on from message {line.goes_on_from}"
        text.append(f"  {after}", "cyan")
    if message["asked"]:
        text.append(f"  answers the call of message {message['asked']['message']}", "dim")
    return text.append("  thrown away by the environment", "red") if rejected else text


def _colour_tokens(rows: Sequence[Token], whole: bool) -> Text:
    """Return the tokens of a message in colour; the marks of the template are faint where they have none."""
    shown = rows if whole else rows[:MOST_MESSAGE_TOKENS]
    text, broken = Text(), False
    for token in shown:
        style = STYLES.get(token["shade"], Style.null())
        said = visible(token["text"] or "")
        if not style and (token["special"] or token["is_content"] is False):
            text.append(said.replace("\n", "⏎"), "dim")
            broken = broken or "\n" in said
        else:
            # Marks of the template stay on one line; what they stand around begins a new one.
            text.append("\n" if broken else "").append(said.replace("\n", "⏎\n"), style)
            broken = False
    text.rstrip()
    left_out = len(rows) - len(shown)
    return text.append(f"\n... {left_out} more tokens (--whole shows all)", "dim") if left_out else text


def _texts(message: Mapping[str, Any], whole: bool) -> Iterator[Text]:
    """Yield what a message says, piece by piece."""
    if message["thoughts"]:
        yield text_cut(message["thoughts"]["text"], whole, "thinks: ", "italic")
    for part in message["parts"]:
        is_image = part["kind"] == "image"
        yield Text("[an image: the page shows it]", "dim") if is_image else text_cut(part["text"]["text"], whole)
    for call in message["calls"]:
        name = one_line(call["name"] or "a call without a name", 80)
        yield text_cut(call["arguments"]["text"], whole, f"calls {name} ")
    if message["rest"]:
        yield text_cut(message["rest"]["text"], whole, "also: ", "dim")


def text_cut(text: str, whole: bool, label: str = "", style: str = "", most: int = MOST_CHARACTERS) -> Text:
    """Return a text of others behind a label, cut with a count of what is left out unless `whole`."""
    shown, left_out = (text, 0) if whole else cut(text, most)
    line = Text().append(label, "yellow").append(visible(shown), style)
    return line.append(f"\n... {left_out} more characters (--whole shows all)", "dim") if left_out else line


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
    reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, options: PrintOptions, out: Console
) -> Iterator[RenderableType]:
    """Yield the tokens of the messages `own` as a table; columns in which no token has a value are left out."""
    read = _with_texts(reader, trace, tokens(reader, trace, own["message"].to_list()))
    read, coloured, legend = shade_tokens(reader, trace, read, options.colour)
    shown = read if options.whole else read.head(MOST_LISTED_TOKENS)
    # False sorts before True: the column that colours the tokens comes first, and is never left out.
    names = sorted((name for name in COLUMNS if _says_something(read, name)), key=coloured.__ne__)
    fitting = max(1, (out.width - 3 * NUMBER - 2 - TEXT) // VALUE)
    if out.color_system:
        yield legend
    headings = [COLUMNS[name] for name in names[:fitting]]
    yield _columns(("message", "place", "id"), Text("token"), headings, "dim")
    for token in shown.iter_rows(named=True):
        text = DASH if token["text"] is None else one_line(token["text"], TEXT)
        values = [_value(token[name]) for name in names[:fitting]]
        places = [str(token[name]) for name in ("message", "place", "token_id")]
        yield _columns(places, Text(text, STYLES.get(token["shade"], "")), values)
    if names[fitting:]:
        left_out = ", ".join(COLUMNS[name] for name in names[fitting:])
        yield Text(f"No room for {left_out} (--width {out.width + VALUE * len(names[fitting:])}, --json)", "dim")
    if len(read) > len(shown):
        yield Text(f"... {len(read) - len(shown)} more tokens (--messages A:B, --whole)", "dim")


def _says_something(tokens: pl.DataFrame, name: str) -> bool:
    """Return whether any token has a value; weights that are all zero are those of a component without members.

    Those that were trained say something where they are others than those of the credit.
    """
    if name.startswith("trained_"):
        return name.removeprefix("trained_") in scaled_weights(tokens)
    values = tokens[name].drop_nulls()
    return len(values) > 0 and (not name.endswith("_weight") or bool((values != 0).any()))


def _columns(places: Sequence[str], text: Text, values: Sequence[str], style: str = "") -> Text:
    """Return a line of columns; wide characters keep them under each other."""
    blanks = len(set_cell_size(text.plain, TEXT)) - len(text)
    before, after = (
        "".join(f"{cell:>{width}}" for cell in cells) for cells, width in ((places, NUMBER), (values, VALUE))
    )
    return Text.assemble(f"{before}  ", text, f"{' ' * blanks}{after}", style=style, no_wrap=True, overflow="ignore")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 4) if value is None or isinstance(value, (int, float)) else one_line(str(value), LINE)


TRACEBACK = 4000
"""Characters of a traceback that are shown, from its end, where the error is."""
LINE = 200
HEAD = (
    {
        **{name: name for name in ("run", "step", "environment")},
        **{"example": "example_id", "agent": "agent", "policy": "policy", "temperature": "temperature"},
    },
    {
        **{"messages": "messages", "branches": "num_branches", "turns": "num_turns", "tokens in": "num_input_tokens"},
        **{"sampled": "num_output_tokens", "ended by": "stop_condition", "truncated": "is_truncated"},
    },
    {name: f"{name}_seconds" for name in ("setup", "generation", "model", "scoring")},
)
"""The lines of facts: titles with the columns of a trace, or what `head` adds to them."""
OUTCOME_STYLES = {"trained": "green", "evaluated": "cyan", "pending": "cyan", "errored": "red"}


def head(reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame, whole: bool) -> Iterator[RenderableType]:
    """Yield the head of a trace; `rows` are its messages, and with `whole` nothing is cut."""
    row, outcome = trace.row, outcome_of(reader, trace)
    detail = f": {outcome['detail']}" if outcome["detail"] else ""
    became = one_line(f"{outcome['outcome']}{detail}", LINE), OUTCOME_STYLES.get(outcome["outcome"], "yellow")
    yield Text.assemble((f"trace {one_line(trace.trace_id, LINE)}", "bold"), "  ", became)
    values = {**row, "run": trace.run, "step": trace.step, "policy": _policies(reader, trace), "messages": len(rows)}
    for titles in HEAD:
        yield Text("   ").join(_fact(title, name, values[name]) for title, name in titles.items())
    yield _rewards(row)
    yield Text(visible(sentence({"trace": row}, outcome)))
    for entry in outcome["quarantines"]:
        yield Text(visible(f"It is in quarantine {entry['quarantine']}: {entry['reason']} (where {entry['where']})."))
    for note in outcome["notes"]:
        yield Text(visible(note_line(note)))
    if others := other_runs(trace):
        yield Text(visible(f"Also used by {', '.join(others)}: --run shows it as they have it."), "dim")
    yield Text(f"Page: {visible(addresses.trace(trace.run, trace.trace_id, trace.key))}", "dim")
    yield from _error(row, whole)


def _policies(reader: StoreReader, trace: FoundTrace) -> str:
    """Return the version of the policy that sampled a trace, of several each with its number of tokens."""
    counts = token_policies(reader, trace).group_by("policy_version").agg(pl.col("num_tokens").sum())
    versions = [f"{version} ({count} tokens)" for version, count in counts.sort("policy_version").iter_rows()]
    return ", ".join(versions) or str(trace.row["policy_version"])


def _fact(title: str, name: str, value: Any) -> Text:
    """Return a value behind its title; one that is missing is a dash."""
    text = seconds(value) if name.endswith("_seconds") else _value(value)
    return Text.assemble((f"{title} ", "dim"), text)


def _rewards(row: Mapping[str, Any]) -> Text:
    """Return the reward with the parts that it is the sum of; not scored is not zero."""
    text = Text.assemble(("reward ", "dim"), (number(row["reward"], 4), "bold"))
    for place, part in enumerate(reward_parts(row["rewards"])):
        worth = f"{_value(part['score'])} x {_value(part['weight'])}" if part["score"] is not None else "not scored"
        text.append(" + " if place else " = ", "dim").append(f"{one_line(part['name'], 60)} {worth}")
    for name, value in parse_object(row["metrics"]).items():
        text.append("   ").append(f"{one_line(name, 60)} ", "dim").append(_value(value))
    return text


def _error(row: Mapping[str, Any], whole: bool) -> Iterator[RenderableType]:
    if not row["error_class"]:
        return
    kind = f"{row['error_class']} error{': ' + row['error_type'] if row['error_type'] else ''}"
    yield Text(f"\n{one_line(kind, LINE)}", "bold red")
    if row["error_message"]:
        yield Indented(text_cut(row["error_message"], whole, most=TRACEBACK), 2)
    if text := row["error_traceback"]:
        left_out = 0 if whole else max(len(text) - TRACEBACK, 0)
        note = f"... {left_out} characters before this (--whole shows all)\n" if left_out else ""
        yield Indented(Text.assemble((note, "dim"), visible(text[left_out:])), 2)

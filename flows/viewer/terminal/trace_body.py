"""The body of a trace on a terminal: its messages with sampled tokens in colour, or its tokens as a list."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
from rich.cells import set_cell_size
from rich.console import Console, RenderableType
from rich.text import Text

from flows.queries.messages import Images, Line, linked, read_message, reading, rejected
from flows.queries.rollouts import largest_advantage
from flows.queries.shown_tokens import default_colouring, scaled
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import tokenizer, tokens, with_texts
from flows.queries.trace import FoundTrace
from flows.reporting.formats import DASH, number
from flows.reporting.texts import cut, one_line, visible
from flows.viewer.terminal.style import COMPONENTS, MEASURES, Colours, Indented, Wanted

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
    shown, gap = _shown(lines, wanted.whole)
    told = {row["message"]: read_message(row, Images([])) for row in _rows(rows, [line.message for line in shown])}
    linked(list(told.values()))
    drawn: dict[int, list[dict[str, Any]]] = {}
    if read.broken:
        yield Text(visible(f"\n{read.broken}"), "red")
    if out.color_system and not wanted.text:
        scale, drawn, why = _drawn_tokens(library, found, [line.message for line in shown], wanted.colour)
        yield Text("\n").append_text(scale.legend() if not why else Text(f"{visible(why)}: texts, not tokens", "dim"))
    dropped = set(rejected(found, rows)) if not read.broken else set()
    for place, line in enumerate(shown):
        if gap and place == gap:
            yield Text(f"\n... {len(lines) - len(shown)} messages between these (--messages A:B, --whole)", "dim")
        yield from _message(told[line.message], line, line.message in dropped, len(read.paths) > 1)
        if line.message in drawn:
            yield Indented(_coloured(drawn[line.message], scale, wanted.whole))
        else:
            yield from _texts(told[line.message], wanted.whole)


def _shown(lines: Sequence[Line], whole: bool) -> tuple[Sequence[Line], int]:
    """Return the lines that are printed, and before which of them some are left out; 0 for nowhere."""
    if whole or len(lines) <= MOST_MESSAGES:
        return lines, 0
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


def _coloured(own: Sequence[dict[str, Any]], scale: Colours, whole: bool) -> Text:
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
        yield Indented(_cut(message["thoughts"]["text"], whole, "thinks: ", "italic"))
    for part in message["parts"]:
        said = Text("[an image: the page shows it]", "dim") if part["kind"] == "image" else None
        yield Indented(said or _cut(part["text"]["text"], whole))
    for call in message["calls"]:
        name = one_line(call["name"] or "a call without a name", 80)
        yield Indented(_cut(call["arguments"]["text"], whole, f"calls {name} "))
    if message["rest"]:
        yield Indented(_cut(message["rest"]["text"], whole, "also: ", "dim"))


def _cut(text: str, whole: bool, label: str = "", style: str = "") -> Text:
    shown, left_out = (text, 0) if whole else cut(text, MOST_CHARACTERS)
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
"""What is told of a token, where any token has it, and its heading."""


def token_list(
    library: StoreReader, found: FoundTrace, rows: pl.DataFrame, own: pl.DataFrame, wanted: Wanted, out: Console
) -> Iterator[RenderableType]:
    """Yield the tokens of the messages `own` as a table; columns in which no token has a value are left out."""
    read = tokens(library, found, own["message"].to_list())
    read = read if "text" in read.columns else with_texts(library, found, read)
    colour = wanted.colour or default_colouring(read)
    scale = Colours(colour, read, largest_advantage(library, found))
    shown = read if wanted.whole else read.head(MOST_LISTED_TOKENS)
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
        return name.removeprefix("trained_") in scaled(tokens)
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

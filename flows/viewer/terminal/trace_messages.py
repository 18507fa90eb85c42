"""Messages of a trace on a terminal: roles, branches, thoughts, tool calls, and what was sampled as coloured tokens."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Console, RenderableType
from rich.text import Text

from flows.viewer.data.attempts import largest_advantage
from flows.viewer.data.images import Images
from flows.viewer.data.messages import rejected
from flows.viewer.data.messages_read import linked, read_message
from flows.viewer.data.messages_window import Line, reading
from flows.viewer.data.tokenizers import tokenizer, with_texts
from flows.viewer.data.tokens import tokens
from flows.viewer.data.tokens_colourings import chosen
from flows.viewer.data.trace import Found
from flows.viewer.library import Library
from flows.viewer.terminal.colours import COMPONENTS, Colours
from flows.viewer.terminal.indented import Indented
from flows.viewer.texts import cut, one_line, visible

if TYPE_CHECKING:
    from flows.viewer.terminal.trace import Wanted

MOST_MESSAGES = 40
"""Messages that are printed; of more, the first and the last half of these."""
MOST_CHARACTERS = 2000
MOST_TOKENS = 600
"""Characters and tokens of one message that are printed."""
ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def conversation(
    library: Library, found: Found, rows: pl.DataFrame, own: pl.DataFrame, wanted: "Wanted", out: Console
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
        scale, drawn, why = _tokens(library, found, [line.message for line in shown], wanted.colour)
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


def _tokens(
    library: Library, found: Found, numbers: Sequence[int], colour: str
) -> tuple[Colours, dict[int, list[dict[str, Any]]], str]:
    """Return the scale of colours, the tokens of the messages of which any was sampled or weighed, and why none are."""
    own = tokens(library, found, numbers)
    scale = Colours(colour or chosen(own), own, largest_advantage(library, found))
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
    shown = own if whole else own[:MOST_TOKENS]
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

"""A rollout on a terminal: its head, its messages with sampled tokens in colour, or its tokens as a plain list.

Called by the command trace. The colours are the shades of the page of a trace (flows.queries.tokens). Texts of
models and environments are made visible (flows.reporting.formats) and put into rich texts, which are never read as
markup.
"""

from collections.abc import Iterator
from typing import Any

import polars as pl
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from flows.queries.notes import note_line
from flows.queries.reader import reward_parts
from flows.queries.request import parse_object
from flows.queries.store_reader import StoreReader, flat
from flows.queries.tokens import COLOURINGS, WEIGHTS, default_colouring, tokens
from flows.queries.trace import FoundTrace, other_runs, outcome_of
from flows.reporting.formats import cut, number, one_line, seconds, visible
from flows.viewer import addresses

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
ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
FACTS = (
    *("environment", "example_id", "agent", "policy_version", "temperature", "num_branches", "num_turns"),
    *("num_input_tokens", "num_output_tokens", "stop_condition", "is_truncated"),
    *("setup_seconds", "generation_seconds", "model_seconds", "scoring_seconds"),
)
"""Columns of a trace in its head."""
REASONS = ("verdict", "regrade", "decision", "quarantines")
"""What decided its outcome."""
MAX_CHARACTERS, LINE = 8000, 200
"""Characters of a text, and of a value."""


def head(reader: StoreReader, trace: FoundTrace) -> Iterator[RenderableType]:
    """Yield the head of a trace: its outcome, facts, rewards, notes and errors."""
    row, outcome = trace.row, outcome_of(reader, trace)
    detail = f": {outcome['detail']}" if outcome["detail"] else ""
    yield _line("trace ", one_line(f"{trace.trace_id}  {outcome['outcome']}{detail}", LINE))
    facts = {"run": trace.run, "step": trace.step} | {name: row[name] for name in FACTS}
    yield Text("   ").join(_line(f"{name.replace('_', ' ')} ", _value(name, value)) for name, value in facts.items())
    yield _rewards(row)
    reasons = flat({name: outcome[name] for name in REASONS})
    yield Text("   ").join(
        _line(one_line(f"{name} ", LINE), _value(name, value)) for name, value in reasons if value is not None
    )
    yield from (Text(visible(note_line(note))) for note in outcome["notes"])
    if others := other_runs(trace):
        yield _line("also used by ", visible(", ".join(others)))
    yield _line("page ", visible(addresses.trace(trace.run, trace.trace_id, trace.key)))
    if row["error_class"]:
        error = (f"{row['error_class']} error: {row['error_type'] or ''}", row["error_message"], row["error_traceback"])
        yield Text(visible("\n" + "\n".join(cut(text, MAX_CHARACTERS)[0] for text in error if text)), "red")


def _line(title: str, text: str) -> Text:
    return Text.assemble((title, "dim"), text)


def _value(name: str, value: Any) -> str:
    if name.endswith("_seconds"):
        return seconds(value)
    is_number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    return number(value, 4) if is_number else one_line(str(value), LINE)


def _rewards(row: Any) -> Text:
    """Return the reward with the parts that it is the sum of, and metrics; not scored is not zero."""
    parts = [
        f"{part['name']} {_value('', part['score'])} x {_value('', part['weight'])}"
        if part["score"] is not None
        else f"{part['name']} not scored"
        for part in reward_parts(row["rewards"])
    ]
    metrics = [f"{name} {_value('', value)}" for name, value in parse_object(row["metrics"]).items()]
    total = number(row["reward"], 4) + (f" = {' + '.join(parts)}" if parts else "")
    return _line("reward ", one_line("   ".join([total, *metrics]), 5 * LINE))


def conversation(
    reader: StoreReader, trace: FoundTrace, rows: pl.DataFrame, colour: str, out: Console
) -> Iterator[RenderableType]:
    """Yield messages of a trace, in the order of their numbers.

    Sampled messages are drawn as tokens in the colours of a measure, without one of that which says most; without
    colours on the terminal all are texts.
    """
    drawn: dict[Any, pl.DataFrame] = {}
    if out.color_system:
        drawn, legend = _drawn_tokens(reader, trace, rows["message"].to_list(), colour)
        yield legend
    previous = None
    for row in rows.to_dicts():
        heading = Text(f"\n{row['message']:>3} ", "dim")
        heading.append(one_line(row["role"], 40), f"bold {ROLES.get(row['role'], 'cyan')}")
        after = f", after message {row['parent']}" if row["parent"] not in (None, previous) else ""
        yield heading.append(f"  {row['num_tokens']} tokens, {row['num_sampled']} sampled{after}", "dim")
        own = drawn.get((row["message"],))
        yield Padding(_text(row["texts"] or "") if own is None else _colour_tokens(own), (0, 0, 0, 4), expand=False)
        previous = row["message"]


def _text(text: str) -> Text:
    shown, left_out = cut(text, MAX_CHARACTERS)
    more = f"\n... {left_out} more characters (--json has all)" if left_out else ""
    return Text.assemble(visible(shown), (more, "dim"))


def _drawn_tokens(
    reader: StoreReader, trace: FoundTrace, numbers: list[int], colour: str
) -> tuple[dict[Any, pl.DataFrame], Text]:
    """Return the tokens of messages with a sampled or weighed token, with `shade`, and the legend."""
    rows = tokens(reader, trace, numbers)
    measure = MEASURES[colour or default_colouring(rows)]
    legend = Text(f"\n{measure.label}:")
    for letter, label in measure.legend():
        legend.append(" ").append(f" {label} ", STYLES[letter])
    weighed = pl.any_horizontal("sampled", *(pl.col(name).fill_null(0) != 0 for name in WEIGHTS.values()))
    shaded = rows.with_columns(shade=pl.Series([*measure.shades(rows)], dtype=pl.String))
    # Without a tokenizer there are texts alone.
    shaded = shaded.filter(weighed.any().over("message") & pl.col("text").is_not_null())
    return shaded.partition_by("message", as_dict=True, maintain_order=True), legend


def _colour_tokens(rows: pl.DataFrame) -> Text:
    text = Text()
    for said, shade in rows.select("text", "shade").iter_rows():
        text.append(visible(said).replace("\n", "⏎\n"), STYLES.get(shade, ""))
    return text


def token_list(reader: StoreReader, trace: FoundTrace, numbers: list[int]) -> Iterator[RenderableType]:
    """Yield the tokens of messages as lines, without the columns in which no token has a value."""
    rows = tokens(reader, trace, numbers)
    says = [name for name in rows.columns if rows[name].null_count() < rows.height and _is_weighed(rows[name])]
    text = pl.col("text").map_elements(lambda said: one_line(said, 22), return_dtype=pl.String)
    listed = rows.with_columns(text).select(says)
    options: dict[str, Any] = {"tbl_rows": -1, "tbl_cols": -1, "tbl_width_chars": 2000, "tbl_formatting": "NOTHING"}
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, **options):
        yield str(listed)  # not a rich text, which the width of a terminal would break


def _is_weighed(values: pl.Series) -> bool:
    """Return whether a column is no weight, or one of a component that some token counts in."""
    return not values.name.endswith("_weight") or bool((values.drop_nulls() != 0).any())

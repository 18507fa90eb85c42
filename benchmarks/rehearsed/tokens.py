"""Tokens of made-up messages: all of a part of a step at once, in flat arrays with borders."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.rehearsed.shapes import Shape
from benchmarks.rehearsed.wording import END, NEWLINE, RARE, ROLE_TOKEN, START, Integers, drawn
from tasks.arrays.ragged import Ragged

HEAD, TAIL = 3, 2
"""Tokens of the chat template before and after the text of a message; the first of the tail is sampled too."""
LENGTHS = {"system": (8, 13), "user": (10, 31), "tool": (4, 13), "call": (10, 25), "assistant": (12, 61)}
"""Tokens of a message's text: the least, and one more than the most."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Streams:
    """The messages of some traces, one after the other."""

    trace: Integers
    """The trace of each message; shape [messages]."""
    number: Integers
    """Its number within the trace."""
    sampled: Flags
    token_ids: Ragged
    mask: Ragged
    is_content: Ragged
    logprobs: Ragged

    def text(self, message: int) -> Integers:
        """Return the token ids of a message's text, without those of the template."""
        first, last = self.token_ids.offsets[message], self.token_ids.offsets[message + 1]
        ids: Integers = self.token_ids.values[first + HEAD : last - TAIL]
        return ids

    def sums(self, values: npt.NDArray[np.generic], num_traces: int) -> Integers:
        """Return per trace the sum of what each token counts."""
        owner = self.trace[self.token_ids.row_of_value]
        return np.bincount(owner, values.astype(np.float64), num_traces).astype(np.int64)


def streams(shapes: Sequence[Shape], surprise: float, chance: np.random.Generator) -> Streams:
    """Return the tokens of traces of these shapes; `surprise` is the mean of a sampled token's -log p, in nats."""
    counts = [len(shape.roles) for shape in shapes]
    kinds = [kind for shape in shapes for kind in _kinds(shape)]
    low, high = (np.array([LENGTHS[kind][end] for kind in kinds], np.int64) for end in (0, 1))
    text = chance.integers(low, high) if kinds else np.zeros(0, np.int64)
    lengths = HEAD + text + TAIL
    sampled = np.array([flag for shape in shapes for flag in shape.sampled], np.bool_)
    layout = Ragged.from_lengths(np.zeros(int(lengths.sum()), np.int32), lengths)
    row = layout.row_of_value
    position = np.arange(len(row)) - layout.offsets[:-1][row]
    content = (position >= HEAD) & (position < HEAD + text[row])
    mask = sampled[row] & (position >= HEAD) & (position <= HEAD + text[row])
    logprobs = np.where(mask, -chance.exponential(surprise, len(row)), 0).astype(np.float32)
    ids = np.where(content, drawn(chance, len(row)), _template(position, text[row], _role_tokens(shapes)[row]))
    trace = np.repeat(np.arange(len(shapes)), counts)
    number = np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)])
    return Streams(
        trace,
        number,
        sampled,
        Ragged(ids.astype(np.int32), layout.offsets),
        Ragged(mask, layout.offsets),
        Ragged(content, layout.offsets),
        Ragged(logprobs, layout.offsets),
    )


def make_loops(made: Streams, messages: Sequence[int]) -> None:
    """Let messages say one word over and over, and be certain of it."""
    for message in messages:
        body = _body(made, message)
        made.token_ids.values[body] = made.token_ids.values[body.start]
        made.logprobs.values[body] = -0.0005


def make_gibberish(made: Streams, messages: Sequence[int]) -> None:
    """Put a token into messages that is rare and was very unlikely."""
    for message in messages:
        body = _body(made, message)
        made.token_ids.values[body.start + 1] = RARE + 50
        made.logprobs.values[body.start + 1] = -14.0


def _body(made: Streams, message: int) -> slice:
    first, last = made.token_ids.offsets[message], made.token_ids.offsets[message + 1]
    return slice(int(first) + HEAD, int(last) - TAIL)


def _kinds(shape: Shape) -> list[str]:
    return ["call" if number in shape.calls else role for number, role in enumerate(shape.roles)]


def _role_tokens(shapes: Sequence[Shape]) -> Integers:
    return np.array([ROLE_TOKEN[role] for shape in shapes for role in shape.roles], np.int64)


def _template(position: Integers, text: Integers, role: Integers) -> Integers:
    """Return what the chat template puts around a text: start, role and newline before it, end and newline after."""
    last = HEAD + text
    around = [position == 0, position == 1, position == 2, position == last]
    return np.select(around, [np.full_like(role, START), role, np.full_like(role, NEWLINE), np.full_like(role, END)], 3)

"""A packed row as a bar: one segment for each sample, as long as its tokens, and the room that is left."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.levels import diverging, sequential
from flows.viewer.texts import one_line

HEIGHT = 18


def packed_row(row: Mapping[str, Any], capacity: int | None, largest: float | None, rewards: tuple[Any, Any]) -> Markup:
    """Return a row as SVG as wide as its place; every segment leads to its trace.

    `capacity` are the tokens that fill the width (None: the row's own), `largest` the size of the batch's largest
    advantage, `rewards` its lowest and highest reward: what the colours are measured by.
    """
    longest = max([capacity or 1, *(each["start"] + each["num_tokens"] for each in row["samples"])])
    drawn = Markup("").join(_segment(each, longest, largest, rewards) for each in row["samples"])
    room = "" if capacity is None else f" of {capacity}"
    label = f"row {row['row']}: {row['num_samples']} samples, {row['num_tokens']}{room} tokens"
    return Markup(
        '<svg class="packed-row" width="100%" height="{}" role="img" aria-label="{}">'
        '<rect class="room" width="100%" height="{}"/>{}</svg>'
    ).format(HEIGHT, label, HEIGHT, drawn)


def _segment(sample: Mapping[str, Any], longest: int, largest: float | None, rewards: tuple[Any, Any]) -> Markup:
    start, width = (100 * sample[name] / longest for name in ("start", "num_tokens"))
    classes = " ".join(
        (
            "seg",
            f"adv-{diverging(sample['advantage'], largest)}",
            f"rew-{sequential(sample['reward'], *rewards)}",
            f"own-{sample['place'] % 8}",
            f"env-{'none' if sample['of_environment'] is None else sample['of_environment'] % 8}",
        )
    )
    inner = Markup('<rect class="{}" x="{:.4f}%" width="{:.4f}%" height="{}"><title>{}</title></rect>').format(
        classes, start, width, HEIGHT, _told(sample)
    )
    if not sample["address"]:
        return inner
    return Markup('<a href="{}" aria-label="{}" tabindex="-1">{}</a>').format(
        sample["address"], f"trace {sample['trace_id'][:8]}", inner
    )


def _told(sample: Mapping[str, Any]) -> str:
    """Return the lines that are shown of a sample when it is pointed at."""
    numbers = [f"{name} {_number(sample[name])}" for name in ("advantage", "reward", "baseline")]
    where = f"{sample['environment']} / {sample['example_id']}" if sample["environment"] else "its trace is not there"
    lines = [sample["sample_id"], where, *numbers, f"{sample['num_tokens']} tokens, from {sample['start']} on"]
    return "\n".join(one_line(line, 120) for line in lines)


def _number(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.4g}"

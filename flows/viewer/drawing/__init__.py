"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

from collections.abc import Callable

from markupsafe import Markup

from flows.viewer.drawing.packed import packed_row

DRAWINGS: dict[str, Callable[..., Markup]] = {"packed_row": packed_row}
"""What templates may draw, by name."""

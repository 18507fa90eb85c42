"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

from collections.abc import Callable

from markupsafe import Markup

DRAWINGS: dict[str, Callable[..., Markup]] = {}
"""What templates may draw, by name."""

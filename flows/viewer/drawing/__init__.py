"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

from collections.abc import Callable

from markupsafe import Markup

from flows.viewer.drawing.charts import chart
from flows.viewer.drawing.ledgers import ledger
from flows.viewer.drawing.packed import packed_row
from flows.viewer.drawing.sparklines import sparkline
from flows.viewer.drawing.timelines import timeline

DRAWINGS: dict[str, Callable[..., Markup]] = {
    "packed_row": packed_row,
    "chart": chart,
    "ledger_picture": ledger,
    "sparkline": sparkline,
    "timeline_picture": timeline,
}
"""What templates may draw, by name."""

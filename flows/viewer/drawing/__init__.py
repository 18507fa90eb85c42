"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

from collections.abc import Callable

from markupsafe import Markup

from flows.viewer.drawing.attempts import attempts
from flows.viewer.drawing.charts import chart
from flows.viewer.drawing.ledgers import ledger
from flows.viewer.drawing.message_graph import message_graph
from flows.viewer.drawing.packed import packed_row
from flows.viewer.drawing.sparklines import sparkline
from flows.viewer.drawing.timelines import timeline
from flows.viewer.drawing.trace_time import trace_time

DRAWINGS: dict[str, Callable[..., Markup]] = {
    "packed_row": packed_row,
    "chart": chart,
    "ledger_picture": ledger,
    "sparkline": sparkline,
    "timeline_picture": timeline,
    "attempts_picture": attempts,
    "message_graph": message_graph,
    "trace_time": trace_time,
}
"""What templates may draw, by name."""

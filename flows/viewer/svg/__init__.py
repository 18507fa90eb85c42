"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

from collections.abc import Callable

from markupsafe import Markup

from flows.viewer.svg.charts import chart, sparkline
from flows.viewer.svg.rollouts import attempts, message_graph, packed_row, trace_time
from flows.viewer.svg.runs import ledger, timeline

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

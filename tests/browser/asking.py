"""What tests of the viewer ask of a window: its address, a page as JSON, a trace of the demo."""

import json
from typing import Any
from urllib.parse import parse_qs

from tests.browser.viewing import Watched


def question(window: Watched) -> dict[str, str]:
    """What the page's address asks, by the page itself: who drives it is told of a change a moment later."""
    asked = window.page.evaluate("location.search")
    return {name: values[0] for name, values in parse_qs(asked.removeprefix("?")).items()}


def said(window: Watched, address: str) -> Any:
    """What a page says, as JSON."""
    join = "&" if "?" in address else "?"
    return json.loads(window.page.request.get(f"{window.base}{address}{join}format=json").text())


def a_trace(window: Watched) -> str:
    """The address of a trace of the demo's first step that was trained on."""
    window.open("/runs/demo/steps/0?trained=yes")
    return str(window.page.locator("table.traces tbody a").first.get_attribute("href"))

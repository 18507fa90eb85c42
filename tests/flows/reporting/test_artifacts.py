"""What a run shows in Prefect, from plain data."""

import base64
import logging
import math
import re
import threading
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.reporting import artifacts, bookkeeping
from flows.reporting.curve import LEFT, RIGHT, WIDTH, Point, curve_svg
from flows.reporting.svg import MOST_POINTS, ticks
from tests.fixtures.waiting import PATIENCE

SVG = "{http://www.w3.org/2000/svg}"


def step(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": number,
        "reward": number / 10,
        "reward_std": 0.1,
        "tokens": 12_345,
        "seconds": {"rollout": 1.25, "training": 0.5},
        "update": {"entropy": 0.51234, "mismatch_kl": 1.5e-06, "grad_norm": None},
    }
    return {**values, **changes}


def line(svg: str) -> list[tuple[float, float]]:
    """The points of the curve in a drawing."""
    [found] = (path for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("class") == "line")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", found.attrib["d"])]


def test_the_curve_goes_from_axis_to_axis_and_up():
    points = line(curve_svg([Point(0, 0.0), Point(1, 0.5), Point(2, 1.0)], "demo"))
    assert [x for x, _ in points] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.11)
    assert points[0][1] > points[1][1] > points[2][1]  # the y of SVG grows downwards


def test_a_curve_of_nothing_and_of_what_is_not_finite_says_so():
    for points in ([], [Point(0, math.nan), Point(1, math.inf), Point(2, 0.5, math.nan)]):
        svg = curve_svg(points, "demo")
        assert "no scored step yet" in svg
        assert "nan" not in svg and "inf" not in svg


def test_the_curve_stays_small_and_well_formed():
    svg = curve_svg([Point(k, math.sin(k) ** 2, 0.123456) for k in range(20_000)], "a <b> & c")
    assert len(base64.b64encode(svg.encode())) < 20_000
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "a <b> & c" in texts
    assert len(line(svg)) <= MOST_POINTS


def test_ticks_are_round():
    assert ticks(0.0, 1.0, 6) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] and ticks(0.0, 19.0, 9) == [0.0, 5.0, 10.0, 15.0]
    assert ticks(0.0, 0.7, 8)[3] == 0.3 and ticks(0.0, 1.1e-13, 6) == [0.0, 5e-14, 1e-13]


def test_the_report_has_the_curve_inline_the_last_steps_and_the_store():
    page = artifacts.report("my_run", "/data/store", [step(k) for k in range(12)])
    [image] = re.findall(r"!\[curve\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", page)
    assert len(line(base64.b64decode(image).decode())) == 12
    rows = [row for row in page.splitlines() if re.match(r"\| \d", row)]
    assert len(rows) == artifacts.SHOWN_STEPS
    assert rows[-1] == "| 11 | 1.1 | 0.1 | 0.512 | 1.5e-06 | - | 1.75 | 12,345 |"
    assert "Tables: /data/store" in page
    assert r"stagecoach show my\_run" in page
    assert r"stagecoach view --run my\_run" in page
    assert r"# my\_run" in page


def test_a_step_without_reward_is_not_a_step_of_zero(monkeypatch):
    monkeypatch.setenv(artifacts.VIEW_VARIABLE, "https://viewer.example/")
    page = artifacts.report("my run", "/s", [step(0, reward=None, update=None), step(1)])
    assert "| 0 | - | 0.1 | - | - | - | 1.75 | 12,345 |" in page
    assert artifacts.reward_curve([step(0, reward=None)], "t").count("no scored step yet") == 1
    assert "(https://viewer.example/runs/my%20run)" in page and "stagecoach view" not in page


def test_text_is_escaped():
    assert artifacts.escape("a|b `c` <img> [x](y)\n# h") == r"a\|b \`c\` &lt;img&gt; \[x\]\(y\) \# h"
    assert artifacts.link("https://store.example/run") == r"[https:/\/store.example/run](https://store.example/run)"
    assert artifacts.link("https://a/) [x](javascript:1)") == r"https:/\/a/\) \[x\]\(javascript:1\)"
    assert artifacts.link("/data/my_store") == r"/data/my\_store"


@given(st.text(max_size=40))
def test_keys_are_as_prefect_wants_them(name):
    assert re.fullmatch(r"run(-[a-z0-9]+)*", artifacts.artifact_key("run", name))


def test_artifacts_of_quick_steps_are_renewed_once_in_a_while_and_at_the_end(monkeypatch):
    published, now = list[int](), 0.0
    watch = artifacts.RunArtifacts("run", "/s", 9, clock=lambda: now)
    monkeypatch.setattr(watch, "_publish", lambda steps, comparison: published.append(len(steps)))
    watch("prefect", {})
    for number in range(9):
        watch("step", step(number, computed=True))
        now += 2.0
    assert published == [1, 4, 7, 9]


def test_what_a_busy_api_has_not_shown_by_the_end_is_waited_for(monkeypatch):
    watch, published, busy = artifacts.RunArtifacts("run", "/s", 2), list[tuple[int, int]](), threading.Event()

    def publish(steps: artifacts.Steps, comparison: artifacts.Rows) -> None:
        assert busy.wait(PATIENCE)
        published.append((len(steps), len(comparison)))

    monkeypatch.setattr(bookkeeping, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(bookkeeping, "LAST_SECONDS", PATIENCE)
    monkeypatch.setattr(watch, "_publish", publish)
    watch("prefect", {})
    for number in range(2):
        watch("step", step(number, computed=True))
    watch("comparison", {"rows": [{}, {}]})
    watch("end", {"ending": "cancelled"})
    assert published == []  # a run that was ended from outside has no time to wait
    threading.Timer(0.2, busy.set).start()
    watch("end", {"ending": "finished"})
    assert published == [(2, 0), (2, 2)]


def test_an_api_that_fails_is_told_of_once_and_asked_again_after_a_while_and_at_the_end(monkeypatch, caplog):
    watch, asked = artifacts.RunArtifacts("run", "/s", 3), list[int]()

    def publish(*_: Any) -> None:
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionError("connection refused")

    monkeypatch.setattr(watch, "_publish", publish)
    watch("prefect", {})
    with caplog.at_level(logging.WARNING, "stagecoach"):
        watch("step", step(0, computed=True))
        watch("stage", {})
        assert len(asked) == 1  # each attempt may wait for the API
        watch._quiet_until = 0.0
        watch("stage", {})
        watch("stage", {})
        assert len(asked) == 2
        watch("end", {"ending": "finished"})
        watch("end", {"ending": "finished"})
    assert len(asked) == 3  # nothing is behind any more
    assert [record.getMessage() for record in caplog.records] == [
        "artifacts are not shown in Prefect for now, the run goes on: connection refused"
    ]

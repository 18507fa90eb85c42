"""The panel on a real pseudo-terminal, and plain lines elsewhere."""

import io
import os
import pty
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flows.reporting.formats import block_rows, over_width, sparkline
from flows.reporting.panel import Panel, duration, is_terminal, printable


@pytest.fixture(autouse=True)
def no_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def done(step, reward, tokens, seconds, entropy=None, **facts):
    """A finished step as a run reports it."""
    facts |= {"seconds": {"rollout": seconds}, "metrics": {"updates/entropy/mean": entropy}}
    return {"step": step, "reward": reward, "tokens": tokens} | facts


def drawn(panel, width=90):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel)
    return console.file.getvalue()


def test_plain_lines_say_each_step_and_note():
    stream = io.StringIO()
    with Panel("demo", 12, "http://127.0.0.1:4000", stream=stream) as panel:
        panel.stage(0, "rollout")
        panel.step(done(0, 0.1234, 5_000, 2.0))
        panel.step(done(1, None, 0, 0.0))
        panel.step(done(2, 0.5, 1000, 10.0, computed=False))
        panel.note("saved\nthe policy")
    with Panel("replay", 2, stream=stream, first_step=8) as panel:
        panel.step(done(9, 0.5, 1_000, 2.0))
    assert stream.getvalue().splitlines() == [
        "demo: 12 steps, http://127.0.0.1:4000",
        "step  1/12  reward 0.123  2,500 tokens/s  2.0 s  left 0:22",
        "step  2/12  reward -  - tokens/s  0.0 s  left 0:10",
        "step  3/12  reward 0.500  cached",  # it is no progress of this run
        "saved the policy",
        "replay: 2 steps",
        "step 10/10  reward 0.500  500 tokens/s  2.0 s  left 0:02",
    ]


def test_the_panel_shows_stage_progress_curve_speed_time_and_address():
    clock = iter([0.0] + [100.0] * 9)
    panel = Panel("demo", 20, "http://127.0.0.1:4000", plain=True, stream=io.StringIO(), clock=lambda: next(clock))
    for number in range(10):
        panel.step(done(number, number / 10, 1_000, 6.0))
    panel.stage(10, "training")
    panel.note("[bold]not markup[/bold]")
    text = drawn(panel)
    for part in (
        *("demo", "step 11/20  training", "167 tokens/s", "1:40 gone", "1:00 left", "reward 0.900"),
        *("http://127.0.0.1:4000", "[bold]not markup[/bold]", "▁", "█"),
    ):
        assert part in text


def test_a_run_without_steps_has_no_bar_and_no_curve():
    stream = io.StringIO()
    panel = Panel("evaluate demo", 0, plain=True, stream=stream)
    panel.stage(0, "rollout")
    text = drawn(panel)
    assert "│ rollout " in text
    assert not any(part in text for part in ("steps", "reward", "tokens/s", "left"))
    assert stream.getvalue() == "evaluate demo\n"


@pytest.fixture
def terminal():
    """A pseudo-terminal: what writes to it, and the end from which it is read."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream, master
    os.close(master)


def test_on_a_terminal_the_panel_is_live_and_leaves_its_last_state(terminal):
    stream, master = terminal
    with Panel("demo", 2, stream=stream) as panel:
        panel.note("\x1b[2Jsaid")
        panel.stage(0, "rollout")
        panel.step(done(0, 0.5, 100, 1.0))
        panel.step(done(1, 0.75, 100, 1.0))
    seen = b""
    while select.select([master], [], [], 0.2)[0]:
        seen += os.read(master, 65536)
    text = seen.decode()
    for part in ("demo", "2/2 steps", "reward 0.750", "said"):
        assert part in text
    assert "\x1b[2J" not in text
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is given back
    assert "step 1/2  reward" not in text  # no plain lines


def test_charts_have_scales():
    panel = Panel("demo", 12, plain=True, stream=io.StringIO(), first_step=8)
    for number in range(12):
        panel.step(done(8 + number, -0.5 * (number % 2), 1000, 2.0))
    panel.evaluation(8, [{"environment": "x", "average": 0.5, "interval": None, "pass_at": [], "errors": {}}] * 2)
    charts = [line.strip("│ ").split() for line in drawn(panel, 80).splitlines()]
    top = charts.index(["reward", "-0.500", "tokens/s", "500"])
    assert charts[top + 1][0] == "1" and charts[top + 4][0] == "-0.5" and "500" in charts[top + 1]
    assert charts[top + 5] == ["step", "9", "20"] * 2


@pytest.mark.parametrize("num_steps", [2, 20, 1000])
def test_the_panel_is_drawn_after_every_step(num_steps):
    panel = Panel("demo", num_steps, plain=True, stream=io.StringIO(), first_step=18)
    for number in (18, 19):
        panel.step(done(number, 0.5, 1000, 2.0))
        assert {len(line) for line in drawn(panel, 80).splitlines()} == {80}


def test_where_the_panel_is_not_live(terminal, monkeypatch):
    assert is_terminal(terminal[0]) and not is_terminal(io.StringIO())
    assert Panel("demo", 1, plain=True, stream=terminal[0])._live is None
    for name, value in (("CI", "true"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not is_terminal(terminal[0])


def test_a_reader_that_went_away_does_not_stop_the_run():
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    Panel("demo", 1, stream=stream).note("nobody hears this")
    with pytest.raises(BrokenPipeError):  # as without the panel
        stream.close()


@given(st.text(max_size=80))
def test_printable_text_is_one_line_without_escapes(text):
    result = printable(text)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in result)
    assert printable(result) == result


def test_values_are_drawn_in_eighths_of_blocks():
    assert block_rows([0.0, 0.5, 1.0], 0.0, 1.0) == ["▁▅█"] == [sparkline([2.0, 3.0, 4.0])]
    assert sparkline([float("nan"), 2.0, 3.0, 4.0]) == " ▁▅█"
    assert block_rows([0.0, None, 1.0], 0.0, 1.0, 2) == ["  █", "▁ █"]
    assert block_rows([-1.0, 1.0, float("nan")], -1.0, 1.0) == ["▁█ "]
    assert block_rows([], 0.0, 1.0, 2) == ["", ""] and block_rows([0.0, 0.0], 0.0, 0.0) == ["▁▁"]


@given(st.lists(st.none() | st.floats(-5, 5), max_size=30), st.integers(1, 6))
def test_plots_are_as_wide_and_high_as_asked(values, rows):
    lines = block_rows(values, -5.0, 5.0, rows)
    assert len(lines) == rows and {len(line) for line in lines} == {len(values)}
    assert [sign == " " for sign in lines[-1]] == [value is None for value in values]


def test_durations():
    assert [duration(value) for value in (None, 0, 7.4, 750, 3723)] == ["-", "0:00", "0:07", "12:30", "1:02:03"]


@pytest.mark.parametrize(("width", "rows_of_charts"), [(80, 2), (200, 1), (40, 4)])
def test_charts_stand_side_by_side_over_the_width(width, rows_of_charts):
    panel = Panel("train a", 8, plain=True, stream=io.StringIO())
    for number in range(8):
        panel.step(done(number, number / 8, 1_000 * (number + 1), 1.0, entropy=0.5 - number / 20))
    for average in (0.25, 0.75):
        score = {"environment": "abacus", "average": average, "interval": None, "pass_at": [], "errors": {}}
        panel.evaluation(8, [score])
    lines = drawn(panel, width).splitlines()
    assert {len(line) for line in lines} == {width}
    names = ("reward 0.875", "held out 0.750", "entropy 0.150", "tokens/s 8,000")
    titles = [line for line in lines if any(name in line for name in names)]
    assert len(titles) == rows_of_charts and all(name in "\n".join(titles) for name in names)


def test_values_are_stretched_over_the_width_or_taken_together():
    assert over_width([1.0, None], 4, 8) == [1.0, 1.0, None, None]
    assert over_width([0.0, 1.0, 2.0, 3.0], 4, 2) == [0.5, 2.5]
    assert over_width([], 4, 8) == []


def test_a_service_that_starts_is_named():
    panel = Panel("demo", 12, stream=io.StringIO())
    panel("starting", {"service": "learner"})
    assert "starting learner" in drawn(panel)
    panel("stage", {"stage": "rollout", "step": 0, "evaluating": False})
    assert "starting" not in drawn(panel) and "step 1/12  rollout" in drawn(panel)

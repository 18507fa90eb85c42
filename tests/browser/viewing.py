"""What tests of the viewer in a browser stand on: a store of the demo, viewers as processes, and a Chromium.

Needs Chromium and the package `playwright`: `make test-browser`. STAGECOACH_DEMO_STORE names the store of a finished
demo, which is only read; without it a short one is made with the real engine. Pictures are left in
STAGECOACH_PICTURES, if set.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

from flows.runtime import loop
from flows.runtime.session import record_run
from tests.fixtures.rehearsal import SOURCE, Rehearsal, session_for
from tests.flows.viewer.looking import viewing

CHECKOUT = Path(__file__).parents[2]
SMALL = CHECKOUT / "tests/acceptance/small.toml"
FILTERS = 'filtering.filters=[{type="errored"}, {type="repetition", window=1, probability=0.5}]'
"""One finds something in nearly every rollout and leaves none out, so that a step's list offers a choice of filters."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
UPDATES = 60
"""With which the model of the short demo is taught before it: seconds."""
AT_STEP = """(chart, place) => {
  const box = chart.chart.over.getBoundingClientRect();
  return [box.x + chart.chart.valToPos(chart.figures.x[place], "x"), box.y + box.height / 2];
}"""
"""Where a step of a chart is on the screen."""
PATIENCE = 180_000
"""Milliseconds that a page may take on a busy machine; one that is followed then rests for ten times that."""


def stagecoach(*arguments):
    """Run the command line as a person does, to its end."""
    command = [sys.executable, "-m", "flows.cli", *arguments]
    variables = os.environ | {"PYTHONPATH": str(CHECKOUT)}  # for the processes that it starts elsewhere
    done = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def short_demo(directory):
    """Make a store with two steps of the demo by the real engine, from a model that knows a little, and a replay."""
    store, model = directory / "store", taught_a_little(directory / "model")
    given = ["--store", str(store), "--plain"]
    stagecoach("run", "demo", str(SMALL), f"model.path={model}", "steps=2", FILTERS, "--name", "demo", *given)
    changed = ["--from", "advantage", "--until", "packing", "--set", "algorithm.type=rloo"]  # no learner is needed
    stagecoach("replay", "demo", *changed, "--name", "demo-by-rloo", *given)
    return store


def taught_a_little(directory):
    """Make a model that answers in the form that is asked for and is right now and then, so that rewards differ."""
    from sample_reverse_text.demonstrations import demonstrations

    from tasks.learner.tiny import tiny_qwen3
    from tests.fixtures.warming import WORDS, taught

    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=WORDS)
    rows = demonstrations(16 * UPDATES, seed=1, right=0.5, untagged=0.3, max_length=5)
    said = [
        ([{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}],)
        for row in rows
    ]
    return taught(directory, {}, said)


@contextmanager
def viewer(store, port=0):
    """Serve a store by `stagecoach view`; yield the address without a slash at its end."""
    with viewing(store, port=port) as (_, address):
        yield address.rstrip("/")


class Watched:
    """A page of a browser whose every complaint and request is noted."""

    def __init__(self, page, base):
        self.page, self.base = page, base
        self.complaints, self.elsewhere = [], []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self._complain(message.text, message.type in ("error", "warning")))
        page.on("pageerror", lambda error: self._complain(str(error)))
        page.on("dialog", lambda dialog: (self._complain(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", self._asked)
        page.on("response", lambda answer: self._complain(f"{answer.status} {answer.url}", answer.status >= 400))

    def _complain(self, text, wrong=True):
        if wrong:
            self.complaints.append(text)

    def _asked(self, request):
        if not request.url.startswith((self.base + "/", "data:")):
            self.elsewhere.append(request.url)

    def open(self, address):
        """Go to an address of the viewer; return the page."""
        self.page.goto(self.base + address)
        return self.page

    def address(self):
        """The address of the page without the viewer's own."""
        return str(self.page.url).removeprefix(self.base)

    def quiet(self):
        """Hold that nothing was complained of and nothing asked of anybody else."""
        assert not self.complaints and not self.elsewhere, f"{self.complaints}; asked of others: {self.elsewhere}"


def question(window):
    """What the page's address asks, by the page itself: who drives it is told of a change a moment later."""
    asked = window.page.evaluate("location.search")
    return {name: values[0] for name, values in parse_qs(asked.removeprefix("?")).items()}


def said(window, address):
    """What a page says, as JSON."""
    join = "&" if "?" in address else "?"
    return json.loads(window.page.request.get(f"{window.base}{address}{join}format=json").text())


def a_trace(window):
    """The address of a trace of the demo's first step that was trained on."""
    window.open("/runs/demo/steps/0?outcome=trained")
    return str(window.page.locator("table.traces tbody a").first.get_attribute("href"))


MIDDLE = """(part) => {
  const box = part.getClientRects()[0];
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
"""Of the first line of something: a box around several has no middle of its own."""


def point_at_step(page, place, chart=0):
    """Move the mouse to a step of a chart, by its place; return what the page tells of it."""
    return point_at(page, page.locator(".chart.is-drawn:visible").nth(chart), AT_STEP, place)


def point_at(page, aim, where=MIDDLE, *arguments):
    """Move the mouse over something, as a hand does, until the page tells of it; return what it tells."""
    aim.scroll_into_view_if_needed()
    tip = page.locator(".tip:not([hidden])").first
    for trial in range(PATIENCE // 100):
        x, y = aim.evaluate(where, *arguments)
        page.mouse.move(x + trial % 2, y)
        page.wait_for_timeout(100)  # a page that was just scrolled hides what it told
        if tip.is_visible():
            return str(tip.inner_text())
    raise AssertionError(f"nothing is told of {aim}")


def picture(page, name):
    """Keep a picture for people to look at, where they said where."""
    directory = os.environ.get("STAGECOACH_PICTURES")
    if directory:
        page.screenshot(path=str(Path(directory) / f"{name}.png"))


class Going:
    """A run that goes on a step at a time, when the test says so; the rest is the real walk without engines."""

    def __init__(self, root, name, steps):
        self._thread = ThreadPoolExecutor(1)  # a browser's own loop runs in the thread of the test
        self._steps = self._thread.submit(self._walk, root, name, steps).result()

    def _walk(self, root, name, steps):
        def going():
            session = session_for(root, name, steps=steps)
            with record_run(session):
                yield from loop.train_steps(Rehearsal(session), SOURCE)

        return going()

    def step(self):
        """Do one step; return whether there was one to do: after the last the run is finished."""
        return self._thread.submit(lambda: next(self._steps, None) is not None).result()

    def finish(self):
        """Do the rest of the steps; the run is then over."""
        while self.step():
            pass


SHIFTS = """
window.shifts = [];
window.noteShifts = (entries) => {
  for (const each of entries) {
    const moved = each.sources.map((one) => one.node && (one.node.className || one.node.nodeName));
    window.shifts.push([each.value, each.hadRecentInput, String(moved)]);
  }
};
window.shifting = new PerformanceObserver((list) => window.noteShifts(list.getEntries()));
window.shifting.observe({ type: "layout-shift", buffered: true });
"""
"""Notes what moved on a page without anybody having done anything."""
DRAWN = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => {
  if (window.shifting) window.noteShifts(window.shifting.takeRecords());
  done();
}))))"""
"""Holds when what was done to a page so far has been drawn, and what moved by it is noted."""

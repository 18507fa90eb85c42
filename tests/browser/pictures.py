"""Makes the pictures and recordings of docs/images: `make pictures`, or with ARGS="tour tools" only those.

Real runs are made in a folder whose name the pictures may show. `terminal` needs a new folder, the others use its runs.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import httpx
from PIL import Image, ImageChops

from docs.recording import screens
from storage.read.frames import Frames, existing_store
from storage.read.sql import ask
from tests.browser.viewing import CHECKOUT, CHROMIUM, FLAGS, PATIENCE, SMALL, point_at, viewer
from tests.fixtures.documents import steps
from tests.fixtures.driving import OTHER_FILTER
from tests.fixtures.family_models import tiny_family
from tests.fixtures.waiting import until

IMAGES, RUNS = CHECKOUT / "docs/images", Path("/tmp/stagecoach-pictures")
PORT = 42981
DRAWS_GRAPHS = [flag for flag in FLAGS if flag != "--disable-gpu"] + ["--enable-unsafe-swiftshader"]
RECORDED = (
    "stagecoach demo",
    "stagecoach replay demo --set algorithm.type=rloo --name rloo",
    "stagecoach diff demo rloo",
    "stagecoach lineage 19-5/0 --run demo",
)
STILLS = {
    "mismatch": "stagecoach mismatch demo",
    "sweep": "stagecoach sweep --from demo:18 --over training.learning_rate=1e-4,3e-4 --name rates --plain",
    "experts": "stagecoach sql 'select step, left(a.weights_sha256, 16) as run, left(b.weights_sha256, 16) as replay "
    "from experts.updates a join again.updates b using (step, update) order by step'",
}
"""Commands of which one screen says enough."""
EXPERTS = (
    f"stagecoach run demo {SMALL} --name experts model.path=experts steps=4 training.router_replay=rollout "
    "'algorithm.overlong={max_tokens=40, buffer_tokens=40}' assignment.groups_per_step=2 assignment.group_size=4",
    f"stagecoach replay experts --set '{OTHER_FILTER}' --name again",
)
TOUR = [
    *("/", "/runs/demo", "/runs/demo/changes?a=0&b=19", "/runs/demo/steps/19", "/runs/demo/steps/19/batch?row=0"),
    *("/runs/demo/traces/{trace}?color=entropy", "/runs/demo/search?q=<rev>a", "/compare?a=demo&b=rloo"),
]
"""Addresses of the viewer."""
MAX_SCREENS, PAUSE, REST = 32, 300, 3_000
"""Most screens of a command, the milliseconds that each is shown, and those of the last one and of a page."""
TRACE = "select trace_id from demo.traces where step = 19 and reward = 1 order by trace_id"
WITHOUT_DIRECTORIES = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    texts.currentNode.data = texts.currentNode.data.replace(/\\/\\S*\\/(stagecoach-store)/, "$1");
  }
}"""


def main(*chosen):
    """Make the pictures of these names, or all."""
    from playwright.sync_api import sync_playwright

    RUNS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for make in (terminal, stills, tour, widths, demo, tools, tutorial, prefect):
            if make.__name__ in (chosen or make.__name__):
                make(browser)
        browser.close()


def typed(command, folder=RUNS):
    """Run a command to its end."""
    subprocess.run(["bash", "-c", command], cwd=folder, check=True)


def terminal(browser):
    """Record commands: the last screen of each rests."""
    page, frames = browser.new_page(viewport={"width": 1280, "height": 960}), []
    for command in RECORDED:
        *passing, last = screens(command, RUNS)
        for picture in [*passing[:: 1 + len(passing) // MAX_SCREENS], last]:
            page.set_content(picture)
            frames.append((page.locator("svg").screenshot(), REST if picture is last else PAUSE))
    animate(frames, "terminal")


def stills(browser):
    """Show what single commands print, the last of them of a small model with experts, which earns little."""
    tiny_family(RUNS / "experts", "qwen3_moe", seed=3)
    for command in EXPERTS:
        typed(command)
    page = browser.new_page(viewport={"width": 1280, "height": 960})
    for name, command in STILLS.items():
        *_, last = screens(command, RUNS)
        page.set_content(last)
        picture = Image.open(io.BytesIO(page.locator("svg").screenshot())).convert("RGB")
        inside = picture.crop((20, 40, picture.width - 20, picture.height - 20))
        empty = Image.new("RGB", inside.size, inside.getpixel((0, inside.height - 1)))
        bottom = ImageChops.difference(inside, empty).getbbox()[3] + 60
        picture.crop((0, 0, picture.width, bottom)).save(IMAGES / f"{name}.webp", lossless=True, method=6)


def tour(browser):
    """Go through pages of the viewer."""
    with viewer(RUNS / "stagecoach-store") as address:
        page, frames = opened(browser, address, 800), []
        trace = str(ask(Frames(existing_store(RUNS / "stagecoach-store")), TRACE)["trace_id"][0])
        for place in TOUR:
            answer = page.goto(address + place.format(trace=trace), wait_until="load")
            assert answer.ok, f"{place} shows an error"
            frames.append((shown(page), REST))
    animate(frames, "tour")


def widths(browser):
    """Put a run and a step side by side, in three widths, in light and in dark."""
    sheet, top = Image.new("RGB", (1160, 1480), "grey"), 0
    with viewer(RUNS / "stagecoach-store") as address:
        for place in ("/runs/demo", "/runs/demo/steps/19"):
            for scheme in ("light", "dark"):
                left = 0
                for width in (1600, 800, 420):
                    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
                    page.goto(address + place, wait_until="load")
                    picture = Image.open(io.BytesIO(shown(page))).convert("RGB")
                    sheet.paste(picture.resize((width * 360 // 900, 360), Image.Resampling.LANCZOS), (left, top))
                    left += width * 360 // 900 + 10
                    page.context.close()
                top += 370
    sheet.save(IMAGES / "widths.webp", quality=80, method=6)


def animate(frames, name):
    """Write an animated picture of PNGs and their milliseconds."""
    first, *others = (Image.open(io.BytesIO(png)).convert("RGB") for png, _ in frames)
    shape = {"append_images": others, "duration": [milliseconds for _, milliseconds in frames], "loop": 0}
    first.save(IMAGES / f"{name}.webp", save_all=True, lossless=True, method=6, minimize_size=True, **shape)


def demo(browser):
    """Look at the demo, and at it beside a replay."""
    with viewer(RUNS / "stagecoach-store") as address:
        save(opened(browser, f"{address}/runs/demo", 1090), "run")
        save(opened(browser, f"{address}/runs/demo/steps/19/batch?row=0", 760), "batch")
        save(opened(browser, f"{address}/runs/demo/search?q=<rev>a", 700), "search")
        save(opened(browser, f"{address}/compare?a=demo&b=rloo", 860, color_scheme="dark"), "viewer-compare")


def tools(browser):
    """Look at a rollout with a call that was refused."""
    typed("stagecoach demo calc_tools steps=5 --store tools")
    with viewer(RUNS / "tools") as address:
        place = f"{address}/runs/calc_tools/traces/{trace_with_an_error(RUNS / 'tools')}?color=entropy"
        page = opened(browser, place, 760)
        token = page.locator(".tokens").nth(1).locator(".t").filter(has_text="calc").first  # the first call
        token.evaluate("each => window.scrollBy(0, each.getBoundingClientRect().top - 320)")
        point_at(page, token)
        save(page, "viewer-trace")


def tutorial(browser):
    """Type the tutorial, and look at its two runs."""
    folder = RUNS / "tutorial"
    folder.mkdir(exist_ok=True)
    for step in steps("docs/tutorial.md"):
        if step.file:
            (folder / step.file).write_text(step.text, encoding="utf-8")
        elif not step.reason and step.words[:2] != ["stagecoach", "view"]:
            typed(step.text, folder)
    with viewer(folder / "stagecoach-store") as address:
        save(opened(browser, f"{address}/runs/first/steps/19", 900), "tutorial-step")
        place = f"{address}/runs/first/traces/{wrong_with_full_reward(folder / 'stagecoach-store')}"
        save(opened(browser, place, 560), "tutorial-trace")
        save(opened(browser, f"{address}/compare?a=first&b=second", 560), "tutorial-compare")


def prefect(browser):
    """Look at the page of the run `demo`, and at its artifact, by a server on the store's database."""
    url = f"http://127.0.0.1:{PORT}"
    database = f"sqlite+aiosqlite:///{RUNS / 'stagecoach-store/logs/prefect/prefect.db'}"
    settings = {"API_DATABASE_CONNECTION_URL": database, "SERVER_UI_API_URL": f"{url}/api", "API_URL": f"{url}/api"}
    settings |= {"SERVER_ANALYTICS_ENABLED": "false", "UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    variables = os.environ | {f"PREFECT_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(PORT), "--no-services"]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _answers(f"{url}/api/health"), lambda: "the server does not answer")
        browser = browser.browser_type.launch(executable_path=CHROMIUM, args=DRAWS_GRAPHS)
        run = _one(f"{url}/api/flow_runs/filter", flow_runs={"name": {"any_": ["train-demo"]}})
        # The graph is drawn, then fitted.
        save(opened(browser, f"{url}/runs/flow-run/{run}", 560), "prefect-run", 8_000)
        card = _one(f"{url}/api/artifacts/filter", artifacts={"key": {"any_": ["run-demo"]}})
        save(opened(browser, f"{url}/artifacts/artifact/{card}", 760), "prefect-artifact", 4_000)
        browser.close()
    finally:
        server.terminate()
        server.wait()


def _one(address, **wanted):
    (found,) = httpx.post(address, json=wanted).json()
    return found["id"]


def _answers(address):
    try:
        return httpx.get(address).is_success
    except httpx.HTTPError:
        return False


def opened(browser, address, height, **settings):
    """Return a page in a window of the size that the pictures have."""
    page = browser.new_context(viewport={"width": 1280, "height": height}, **settings).new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address, wait_until="load")
    return page


def save(page, name, pause=1_000):
    """Write what a window shows."""
    (IMAGES / f"{name}.png").write_bytes(shown(page, pause))


def shown(page, pause=1_000):
    """Return what a window shows, without the directory of this machine in which the store lies."""
    page.wait_for_timeout(pause)  # charts are drawn after the page is loaded
    page.evaluate(WITHOUT_DIRECTORIES)
    return page.screenshot()


def trace_with_an_error(store):
    """Return a rollout of the last step whose first call of a tool was refused, and a later one was not."""
    query = """select trace_id from calc_tools.messages where role = 'tool' group by step, trace_id having count(*) > 1
        and arg_min(content, message) like 'error%' and arg_max(content, message) not like 'error%'
        order by step desc"""
    return str(ask(Frames(existing_store(store)), query)["trace_id"][0])


def wrong_with_full_reward(store):
    """Return a rollout of the tutorial's first run that is wrong in its letters alone, and has the reward 1."""
    query = """select t.trace_id, json_extract_string(e.task, '$.answer') as answer from first.traces t
        join first.messages m on m.trace_id = t.trace_id join first.examples e on e.example_id = t.example_id
        where t.step = 19 and t.reward = 1 and m.role = 'assistant' and m.content <> concat('<rev>', answer, '</rev>')
        and length(m.content) = length(answer) + 11 order by reverse(answer), m.content"""
    return str(ask(Frames(existing_store(store)), query)["trace_id"][0])


if __name__ == "__main__":
    main(*sys.argv[1:])

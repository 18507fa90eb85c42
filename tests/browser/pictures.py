"""Makes pictures of the viewer in docs/images: `python -m tests.browser.pictures DEMO TOOLS TUTORIAL`, three stores.

With DEMO alone it makes those of Prefect's pages, from the database that the run of the demo left in its store.

Needs what `make test-browser` needs. The first store holds the demo and a replay of it, the second a run with tools,
the third what docs/tutorial.md makes:

    stagecoach demo
    stagecoach replay demo --set algorithm.type=dr_grpo --until advantage --name demo-dr_grpo
    stagecoach demo calc_tools steps=5 --store tools
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from storage.read.frames import Frames, existing_store
from storage.read.sql import ask
from tests.browser.viewing import CHECKOUT, CHROMIUM, FLAGS, PATIENCE, point_at, viewer
from tests.fixtures.waiting import until

IMAGES = CHECKOUT / "docs/images"
PORT = 42981
DRAWS_GRAPHS = [flag for flag in FLAGS if flag != "--disable-gpu"] + ["--enable-unsafe-swiftshader"]
WITHOUT_DIRECTORIES = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    texts.currentNode.data = texts.currentNode.data.replace(/\\/\\S*\\/(stagecoach-store)/, "$1");
  }
}"""


def main(demo, tools, tutorial):
    """Write the pictures of the three stores."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with viewer(demo) as address:
            save(opened(browser, f"{address}/runs/demo", 1090), "run")
            save(
                opened(browser, f"{address}/compare?a=demo&b=demo-dr_grpo", 860, color_scheme="dark"), "viewer-compare"
            )
        with viewer(tools) as address:
            shown = f"{address}/runs/calc_tools/traces/{trace_with_an_error(tools)}?color=entropy"
            page = opened(browser, shown, 760)
            token = page.locator(".tokens").nth(1).locator(".t").filter(has_text="calc").first  # the first call
            token.evaluate("each => window.scrollBy(0, each.getBoundingClientRect().top - 320)")
            point_at(page, token)
            save(page, "viewer-trace")
        with viewer(tutorial) as address:
            save(opened(browser, f"{address}/runs/first/steps/19", 900), "tutorial-step")
            shown = f"{address}/runs/first/traces/{wrong_with_full_reward(tutorial)}"
            save(opened(browser, shown, 560), "tutorial-trace")
            save(opened(browser, f"{address}/compare?a=first&b=second", 560), "tutorial-compare")
        browser.close()


def prefect_pages(store):
    """Write the pictures of the page of the run `demo`, and of its artifact, by a server on the store's database."""
    from playwright.sync_api import sync_playwright

    url = f"http://127.0.0.1:{PORT}"
    database = f"sqlite+aiosqlite:///{(store / 'logs/prefect/prefect.db').resolve()}"
    settings = {"API_DATABASE_CONNECTION_URL": database, "SERVER_UI_API_URL": f"{url}/api", "API_URL": f"{url}/api"}
    settings |= {"SERVER_ANALYTICS_ENABLED": "false", "UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    variables = os.environ | {f"PREFECT_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(PORT), "--no-services"]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _answers(f"{url}/api/health"), lambda: "the server does not answer")
        with sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=CHROMIUM, args=DRAWS_GRAPHS)
            run = _one(f"{url}/api/flow_runs/filter", flow_runs={"name": {"any_": ["train-demo"]}})
            page = opened(browser, f"{url}/runs/flow-run/{run}", 560)
            save(page, "prefect-run", 8000)  # the graph is drawn, then fitted
            card = _one(f"{url}/api/artifacts/filter", artifacts={"key": {"any_": ["run-demo"]}})
            save(opened(browser, f"{url}/artifacts/artifact/{card}", 760), "prefect-artifact", 4000)
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


def save(page, name, milliseconds=500):
    """Write what a window shows, without the directory of this machine in which the store lies."""
    page.wait_for_timeout(milliseconds)  # charts are drawn after the page is loaded
    page.evaluate(WITHOUT_DIRECTORIES)
    page.screenshot(path=str(IMAGES / f"{name}.png"))


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
    (prefect_pages if len(sys.argv) == 2 else main)(*map(Path, sys.argv[1:4]))

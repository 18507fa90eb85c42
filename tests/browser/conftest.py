"""One Chromium, and one store of the demo with its viewer, for all tests of the viewer in a browser."""

import os
from pathlib import Path

import pytest

from tests.browser.viewing import CHROMIUM, FLAGS, Watched, short_demo, viewer


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory):
    given = os.environ.get("STAGECOACH_DEMO_STORE")
    return Path(given) if given else short_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def demo(demo_store):
    """The address of a viewer of the demo's store."""
    with viewer(demo_store) as address:
        yield address


@pytest.fixture
def opened(chromium):
    """Opens a window on a viewer; what it complains of and asks of others is held to be nothing at the end."""
    windows = []

    def window(base, script="", **settings):
        context = chromium.new_context(viewport={"width": 1360, "height": 900}, **settings)
        if script:
            context.add_init_script(script)
        windows.append(Watched(context.new_page(), base))
        return windows[-1]

    yield window
    for each in windows:
        each.page.context.close()
    for each in windows:
        each.quiet()

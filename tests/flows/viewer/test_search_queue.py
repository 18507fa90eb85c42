"""Searches whose conditions never end or take the memory of a machine: other pages and readers do not wait for them."""

import http.client
import os
import time
from contextlib import ExitStack
from urllib.parse import urlencode, urlsplit

import psutil
import pytest

from flows.viewer.app import MAX_SEARCHES
from tests.fixtures.waiting import PATIENCE
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import viewing
from tests.flows.viewer.stepped import stepped

pytestmark = pytest.mark.engine
ENDLESS = "(select count(*) from range(100000000000)) > 0"
TOO_LARGE = "len(range(3000000000)) > 0"
SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}


@pytest.fixture(scope="module")
def viewer(tmp_path_factory):
    root = tmp_path_factory.mktemp("searched") / "store"
    stepped(root)
    with viewing(root) as (process, address):
        yield psutil.Process(process.pid), urlsplit(address).port or 0


def send(port, target, client="127.0.0.1", **headers):
    """Send a request from one of the loopback's addresses; the viewer takes each for a client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE, source_address=(client, 0))
    connection.request("GET", target, headers=headers)
    return connection


def body(connection):
    response = connection.getresponse()
    return response.status, response.read().decode()


def search(condition):
    return f"/runs/{RUN}/search?{urlencode({'q': condition})}"


def wait_for_children(process, least, most):
    end = time.monotonic() + PATIENCE
    while not least <= len(process.children()) <= most:
        assert time.monotonic() < end, process.children()
        time.sleep(0.05)


def memory(process):
    """Return the memory of a process and its children, in bytes, without what they share."""
    total = 0
    for part in (process, *process.children()):
        try:
            total += part.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total


def test_pages_are_answered_beside_a_hundred_conditions_which_end_with_their_readers(
    viewer,
):
    process, port = viewer
    with ExitStack() as stack:
        for number in range(100):
            connection = send(port, search((ENDLESS, TOO_LARGE)[number % 2]), f"127.0.0.{number // 10 + 1}")
            stack.callback(connection.close)
        wait_for_children(process, 1, MAX_SEARCHES)
        for _ in range(20):
            assert body(send(port, "/"))[0] == 200
            assert len(process.children()) <= MAX_SEARCHES and memory(process) < 3.5 * 2**30
    wait_for_children(process, 0, 0)
    status, page = body(send(port, search("1 > 0")))
    assert status == 200 and "0 of" not in page


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one search at a time on one processor")
def test_a_client_does_not_wait_for_the_searches_of_another(viewer):
    process, port = viewer
    with ExitStack() as stack:
        for _ in range(5):
            stack.callback(send(port, search(ENDLESS)).close)
        wait_for_children(process, 1, 1)
        status, page = body(send(port, search("reward is not null"), "127.0.0.2"))
        assert status == 200 and "rollouts</h2>" in page
        assert len(process.children()) == 1, "the first client's search still runs"


def test_pages_of_other_sites_make_the_viewer_compute_nothing(viewer):
    _, port = viewer
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert body(send(port, search(ENDLESS), **image)) == (
        403,
        "This viewer answers no requests of other sites' pages.\n",
    )
    assert body(send(port, search(ENDLESS), **image | {"Sec-Fetch-Site": "same-site"}))[0] == 403
    assert body(send(port, search(ENDLESS), **SITE, **{"Sec-Fetch-Dest": "iframe"}))[0] == 403
    link = {**SITE, "Sec-Fetch-Dest": "document"}
    status, page = body(send(port, search(ENDLESS), **link))
    assert status == 200 and "Another site opened this address" in page and "range(100000000000)" in page
    assert body(send(port, "/", **link))[0] == 200
    status, page = body(send(port, search("1 > 0"), **{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "document"}))
    assert status == 200 and "Another site" not in page


def test_a_condition_that_is_nested_too_deeply_is_no_fault_of_the_viewer(viewer):
    _, port = viewer
    for text in ("abs(" * 900 + "1" + ")" * 900 + " > 0", "(" * 9000 + "1" + ")" * 9000, "reward > abs(" * 900):
        assert body(send(port, search(text)))[0] == 200

"""A page that is open while its run goes on: new points come, nothing jumps, and a person is not disturbed."""

from urllib.parse import urlsplit

import pytest

from storage.store import open_store
from tests.browser.viewing import DRAWN, SHIFTS, Going, picture, viewer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
STEPS = 5
POINTS = """() => [...document.querySelectorAll(".chart[data-chart]")].reduce(
  (sum, chart) => sum + JSON.parse(chart.dataset.chart).steps.length, 0)"""
"""How many steps all charts have together."""
PLACES = """() => [...document.querySelectorAll("main > *, main section, main figure")].map((each) => {
  const box = each.getBoundingClientRect();
  return [each.dataset.live || each.className, box.x + scrollX, box.y + scrollY, box.width];
}).filter((each) => each[3])"""
SHIFTED = "() => window.shifts.filter(([value, ours]) => value > 0 && !ours)"


@pytest.fixture
def live(tmp_path):
    """A run that goes on, and the address of a viewer of its store."""
    going = Going(tmp_path / "store", "going", STEPS)
    going.step()
    with viewer(tmp_path / "store") as address:
        yield going, address
    going.finish()


def wait_for_steps(page, number):
    page.wait_for_function(
        "(number) => document.querySelector('progress').getAttribute('value') === String(number)", arg=number
    )


def test_new_points_come_and_nothing_moves(live, opened):
    going, address = live
    page = opened(address, SHIFTS).open("/runs/going")
    going.step()
    wait_for_steps(page, 2)  # a run of one step alone has no lines yet
    page.evaluate(DRAWN)
    places, points = page.evaluate(PLACES), page.evaluate(POINTS)
    page.evaluate("window.shifts.length = 0")
    for number in (3, 4):
        going.step()
        wait_for_steps(page, number)
    page.evaluate(DRAWN)
    assert page.evaluate(POINTS) > points
    assert page.evaluate(PLACES) == places
    assert page.evaluate(SHIFTED) == []
    picture(page, "live")


def test_scrolling_focus_and_what_is_opened_are_left_alone(live, opened):
    going, address = live
    page = opened(address).open("/runs/going")
    going.step()
    wait_for_steps(page, 2)
    page.locator("#numbers summary").click()
    link = page.locator("#numbers tbody a").first
    link.focus()
    page.evaluate("scrollTo(0, 700)")
    page.evaluate(DRAWN)
    before = page.evaluate("[scrollY, document.activeElement.getAttribute('href')]")
    assert before == [700, "/runs/going/steps/0"]
    going.step()
    wait_for_steps(page, 3)
    page.locator("#numbers tbody tr").nth(2).wait_for()  # the table with the focus in it was taken anew, and is open
    assert page.evaluate("[scrollY, document.activeElement.getAttribute('href')]") == before


def test_a_choice_in_the_list_is_kept_while_runs_go_on(live, opened, tmp_path):
    going, address = live
    assert opened(address).open("/").locator("input[type=radio]").count() == 0, "one run alone is compared with none"
    open_store(tmp_path / "store").runs.record(run="other", event="failed", kind="train", config={"steps": 1})
    page = opened(address).open("/")
    page.get_by_label("compare going as A", exact=True).check()
    page.locator("[data-search]").fill("typing")
    going.step()
    page.wait_for_function("() => document.querySelector('main').innerText.includes('2 / 5')")
    assert page.get_by_label("compare going as A", exact=True).is_checked()
    assert page.locator("[data-search]").input_value() == "typing"


def test_a_run_that_ends_says_so_and_is_asked_for_no_more(live, opened):
    going, address = live
    page = opened(address).open("/runs/going")
    assert page.locator("[data-live-state]").count() == 1
    page.locator("#changed summary").click()
    page.evaluate("window.stays = 'so'; scrollTo(0, 300)")
    going.finish()
    page.locator(".chip", has_text="finished").first.wait_for()
    page.locator("[data-live-state]").wait_for(state="detached")
    assert page.evaluate("[window.stays, scrollY]") == ["so", 300] and page.locator("#changed[open]").count() == 1
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(5000)
    assert asked == []


def test_the_start_page_says_what_is_new_since_the_last_look(live, opened):
    going, address = live
    window = opened(address)
    page = window.open("/")
    assert page.locator("[data-news] summary").inner_text() == "What happened last"
    later = window.page.context.new_page()
    later.goto(address)
    assert later.locator("[data-news] summary").inner_text() == "Since you looked last: nothing new"
    going.finish()
    later.locator("[data-news][open] .new", has_text="finished").wait_for()  # without being loaded anew
    later.reload()
    assert later.locator("[data-news] .new").count() == 1, "a tab keeps its own last look"


def test_a_viewer_that_is_gone_is_told(tmp_path, opened):
    going = Going(tmp_path / "store", "going", STEPS)
    going.step()
    with viewer(tmp_path / "store") as address:
        window = opened(address)
        page = window.open("/runs/going")
        page.locator("[data-live-state]", has_text="live").wait_for()
    page.locator("[data-live-state].stale", has_text="not answering").wait_for()
    link = f"{address}/runs/going/steps/0?sort=reward&order=asc&k=3"
    with viewer(tmp_path / "store", urlsplit(address).port):  # started again, open pages go on and links hold
        page.locator("[data-live-state]:not(.stale)").wait_for()
        page.goto(link)
        assert page.locator("article.reply").count() == 3 and page.locator("select[name=order]").input_value() == "asc"
        page.close()  # it would go on asking, and complain again
    going.finish()
    # Refused; or, where it was asking at that moment, reset or left without an answer.
    assert window.complaints and all("net::ERR_" in each for each in window.complaints)
    window.complaints.clear()

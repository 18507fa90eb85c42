"""A person looks at the demo's store in a real browser: with the mouse, by keys alone, and without scripts."""

import re
from urllib.parse import urlsplit

import pytest

from tests.browser.viewing import AT_STEP, a_trace, picture, point_at, point_at_step, question, said

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def column(page, name):
    """The cells of a column of the table of traces."""
    heads = [head.strip() for head in page.locator("table.traces thead th").all_inner_texts()]
    place = next(number for number, head in enumerate(heads) if head.rstrip(" ↑↓").lower() == name)
    return [each.strip() for each in page.locator(f"table.traces tbody td:nth-child({place + 1})").all_inner_texts()]


def test_from_the_list_over_a_point_of_a_chart_to_its_step(demo, opened):
    window = opened(demo)
    page = window.open("/")
    picture(page, "runs")
    page.get_by_role("link", name="demo", exact=True).first.click()
    page.wait_for_url("**/runs/demo")
    picture(page, "run")
    assert "step 1" in point_at_step(page, 1)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/steps/1")
    assert window.address() == "/runs/demo/steps/1"


END = "document.querySelector('.chart.is-drawn').chart.scales.x.max"


def test_a_stretch_that_is_drawn_is_zoomed_into_and_a_double_click_leads_back(demo, opened):
    page = opened(demo).open("/runs/demo")
    point_at_step(page, 0)
    chart = page.locator(".chart.is-drawn:visible").first
    full, (x, y) = page.evaluate(END), chart.evaluate(AT_STEP, 0)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y, steps=4)
    page.mouse.up()
    page.wait_for_function(f"(full) => {END} < full", arg=full)
    page.mouse.dblclick(x + 20, y)
    page.wait_for_function("(full) => document.querySelector('.chart.is-drawn').chart.scales.x.max === full", arg=full)
    assert page.url.endswith("/runs/demo"), "no click of it opened a step"


def test_traces_are_filtered_sorted_and_paged(demo, opened):
    window = opened(demo)
    page = window.open("/runs/demo/steps/0")
    picture(page, "step")
    everything = said(window, "/runs/demo/steps/0")["traces"]["num_all"]
    page.locator("form.filters select[name=filter]").select_option("repetition")
    page.wait_for_url("**filter=repetition*")
    assert set(question(window)) == {"filter"}
    assert said(window, window.address().partition("#")[0])["traces"]["num_chosen"] <= everything
    for order in ("desc", "asc"):
        page.locator("table.traces thead a", has_text=re.compile("^reward", re.I)).first.click()
        page.wait_for_url(f"**order={order}*")
        rewards = [float(each.replace(",", "")) for each in column(page, "reward")]
        assert rewards == sorted(rewards, reverse=order == "desc") and question(window)["sort"] == "reward"
    assert page.locator("table.traces th[aria-sort=ascending]").count() == 1
    page = window.open("/runs/demo/steps/0?size=10")
    first = column(page, "trace")
    page.locator("#traces nav[aria-label=Pages] a[rel=next]").click()
    page.wait_for_url("**page=2*")
    assert len(first) == 10 and not set(first) & set(column(page, "trace"))


def test_a_run_is_compared_with_its_replay(demo, opened):
    window = opened(demo)
    page = window.open("/")
    runs = {each["run"]: each for each in said(window, "/")["runs"]}
    fork = next(name for name, each in runs.items() if each["kind"] == "replay" and each["parent"] == "demo")
    page.get_by_label("compare demo as A", exact=True).check()
    page.get_by_label(f"compare {fork} as B", exact=True).check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/compare?*")
    assert question(window) == {"a": "demo", "b": fork}  # in the order of the list's rows
    picture(page, "compare")
    assert "algorithm" in page.locator("[data-live=config]").text_content()
    page.locator("[data-live=steps] tbody a").first.click()
    page.wait_for_url(f"**/compare?a=demo&b={fork}&step=*")
    assert page.locator("#step h2").count() == 1
    picture(page, "compare-step")


@pytest.mark.parametrize("kind", ["run", "step", "trace", "batch", "compare"])
def test_a_saved_page_works_from_disk_and_asks_nobody(demo, opened, kind, tmp_path):
    window = opened(demo)
    runs = said(window, "/")["runs"]
    fork = next(each["run"] for each in runs if each["parent"] == "demo")
    addresses = {
        "run": "/runs/demo",
        "step": "/runs/demo/steps/0",
        "trace": a_trace(window),
        "batch": "/runs/demo/steps/0/batch?row=0",
        "compare": f"/compare?a=demo&b={fork}",
    }
    page = window.open(addresses[kind])
    with page.expect_download() as loading:
        page.get_by_role("link", name="Save").click()
    file = tmp_path / loading.value.suggested_filename
    loading.value.save_as(file)
    assert file.suffix == ".html"
    kept = opened(file.as_uri()[: -len(file.name) - 1])
    shown = kept.open("/" + file.name)
    assert shown.locator("h1").inner_text() == page.locator("h1").inner_text()
    assert shown.locator("a[href]:not([href^='#'])").count() == 0
    colours = "getComputedStyle(document.querySelector('.card')).borderTopLeftRadius"
    assert shown.evaluate(colours) == page.evaluate(colours) != "0px"
    aims = {"run": ".chart.is-drawn .u-over", "step": "[data-tip]", "trace": ".tokens .t", "batch": ".seg"}
    if kind in aims:
        told = [point_at(each, each.locator(aims[kind]).first) for each in (page, shown)]
        assert told[0] == told[1] != ""
    assert shown.locator("form.filters :is(input, select, button):enabled:visible").count() == 0
    if kind == "trace":
        shown.locator("select[data-colors]").select_option("entropy")
        assert shown.locator(".tokens .t[class*=' k']").count() > 0
    picture(shown, f"saved-{kind}")


def test_pages_are_dark_where_the_system_is(demo, opened):
    page = opened(demo, color_scheme="dark").open("/runs/demo")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    picture(page, "run-dark")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) != dark


def test_everything_is_reached_by_keys_alone(demo, opened):
    page = opened(demo).open("/")
    press = page.keyboard.press
    place = page.evaluate("[...document.querySelectorAll('[data-row] a')].map((a) => a.textContent).indexOf('demo')")
    names = page.locator("[data-row]").locator(".name > a").all_inner_texts()
    for _ in range(names.index("demo") + 1):
        press("j")
    press("j")
    press("k")
    assert place >= 0 and page.evaluate("document.activeElement.textContent") in ("demo", names[-2], names[-1])
    if page.evaluate("document.activeElement.textContent") != "demo":
        press("j")
    press("Enter")
    page.wait_for_url("**/runs/demo")
    press("?")
    assert page.locator("dialog#keys").is_visible()
    press("Escape")
    assert not page.locator("dialog#keys").is_visible()
    page.locator(".chart.is-drawn").first.focus()
    press("ArrowRight")
    press("Enter")
    page.wait_for_url("**/runs/demo/steps/*")
    here = int(urlsplit(page.url).path.rpartition("/")[2])
    press("]")
    page.wait_for_url(f"**/runs/demo/steps/{here + 1}*")
    press("[")
    page.wait_for_url(f"**/runs/demo/steps/{here}*")
    press("u")
    page.wait_for_url("**/runs/demo")
    press("/")
    assert page.evaluate("document.activeElement.name") == "metric"
    page.keyboard.type("j[u?/")
    assert page.locator("[data-search]").first.input_value() == "j[u?/"
    press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    press("u")
    page.wait_for_url(f"{demo}/")


def test_pages_work_without_scripts(demo, opened):
    page = opened(demo, java_script_enabled=False).open("/runs/demo/steps/0")
    page.locator("form.filters select[name=filter]").select_option("repetition")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**filter=repetition*")
    page.locator("table.traces tbody a").first.click()
    page.wait_for_url("**/runs/demo/traces/**")
    page.locator("select[data-colors]").select_option("entropy")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**color=entropy*")
    assert page.locator(".tokens .t[class*=' k']").count() > 0

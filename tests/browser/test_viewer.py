"""A person looks at the demo's store in a real browser: with the mouse, by keys alone, and without scripts."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browser.conftest import Opened
from tests.browser.viewing import Watched, picture, point_at

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
NOBODY_SAYS = "zzzzzqqqqq"


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


def column(page: Any, name: str) -> list[str]:
    """The cells of a column of the table of traces."""
    heads = [head.strip() for head in page.locator("table.traces thead th").all_inner_texts()]
    place = next(number for number, head in enumerate(heads) if head.rstrip(" ↑↓").lower() == name)
    return [each.strip() for each in page.locator(f"table.traces tbody td:nth-child({place + 1})").all_inner_texts()]


def test_from_the_list_over_a_point_of_a_chart_to_its_step(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open("/")
    picture(page, "runs")
    page.get_by_role("link", name="demo", exact=True).first.click()
    page.wait_for_url("**/runs/demo")
    picture(page, "run")
    hit = page.locator("svg.chart .hits a").nth(1)
    aim = hit.get_attribute("href")
    assert "step 1" in point_at(page, hit)
    hit.click(force=True)
    page.wait_for_url(f"**{aim}")
    assert re.fullmatch(r"/runs/demo/steps/1", window.address())


def test_a_metric_is_found_while_typing_and_has_a_chart_of_its_own(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open("/runs/demo")
    entries = page.locator("#metric-list [data-row]:visible")
    assert entries.count() == 0, "folded"
    page.keyboard.press("/")
    page.keyboard.type("entropy nats")
    names = [each.get_attribute("title") for each in entries.locator("a").all()]
    assert names and all(name.split(" ")[0].partition("/")[2].startswith("entropy") for name in names)
    page.locator("[data-sifts]").fill("entropy of nobody")
    assert entries.count() == 0 and page.locator("[data-sifted-out]").is_visible()
    page.locator("[data-sifts]").fill("entropy nats")
    entries.locator("a").first.click()
    page.wait_for_url("**/metrics/**")
    page.go_back()
    entries.first.wait_for()
    assert [each.get_attribute("title") for each in entries.locator("a").all()] == names, "found again"
    assert not page.locator("[data-sifted-out]").is_visible()
    page.locator("[data-sifts]").press("Enter")
    page.wait_for_url("**metric=entropy*")
    assert [each.get_attribute("title") for each in entries.locator("a").all()] == names
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/demo/metrics/**")
    picture(page, "metric")
    assert "step 1 · nats" in point_at(page, page.locator("svg.chart .hits a").nth(1))
    here = page.url
    page.keyboard.press("]")
    page.wait_for_url(lambda address: address != here)
    page.go_back()
    page.get_by_role("link", name="All metrics").click()
    page.wait_for_url("**#metric-list")
    assert page.locator("#metric-list [data-row]:visible").count() > 50, "the fold opens for who is sent into it"


def test_traces_are_filtered_sorted_searched_and_paged(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open("/runs/demo/steps/0")
    picture(page, "step")
    rows = page.locator("table.traces tbody tr")
    everything = said(window, "/runs/demo/steps/0")["traces"]["num_all"]
    page.locator("form.filters select[name=trained]").select_option("yes")
    page.wait_for_url("**trained=yes*")
    assert set(question(window)) == {"trained"}
    assert said(window, window.address().partition("#")[0])["traces"]["num_chosen"] <= everything
    page.locator("table.traces thead a", has_text=re.compile("^reward", re.I)).first.click()
    page.wait_for_url("**sort=reward*")
    down = [float(each.replace("\u202f", "")) for each in column(page, "reward")]
    assert down == sorted(down, reverse=True) and "desc" in question(window)["order"]
    page.locator("table.traces thead a", has_text=re.compile("^reward", re.I)).first.click()
    page.wait_for_url("**order=asc*")
    up = [float(each.replace("\u202f", "")) for each in column(page, "reward")]
    assert up == sorted(up)
    assert page.locator("table.traces th[aria-sort=ascending]").count() == 1
    page.locator("[data-search]").fill(NOBODY_SAYS)
    page.locator("[data-search]").press("Enter")
    page.wait_for_url(f"**search={NOBODY_SAYS}*")
    assert question(window)["trained"] == "yes" and rows.count() == 0
    assert page.get_by_text("No trace is like that.").count() == 1
    page.go_back()
    assert page.locator("table.traces tbody tr").count() > 0
    page = window.open("/runs/demo/steps/0?size=10")
    first = column(page, "trace")
    page.locator("#traces nav[aria-label=Pages] a[rel=next]").click()
    page.wait_for_url("**page=2*")
    assert len(first) == 10 and not set(first) & set(column(page, "trace"))


def test_tokens_change_their_colours_and_the_address_says_which(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open(a_trace(window))
    picture(page, "trace")
    classes = "return [...document.querySelectorAll('.tokens .t')].map((each) => each.className).join()"
    choice = page.locator("select[data-colors]")
    names = choice.locator("option").evaluate_all("all => all.map((each) => each.value)")
    assert {"advantage", "entropy", "mismatch"} <= {re.sub("_.*", "", name) for name in names}, names
    seen = {}
    for name in names:
        choice.select_option(name)
        assert question(window)["color"] == name
        seen[name] = page.evaluate(f"() => {{ {classes} }}")
        assert page.locator("[data-legend]:visible").count() == (0 if name == "none" else 1)
    assert len(set(seen.values())) > 3
    last = names[-1]
    page.reload()
    assert choice.input_value() == last and page.evaluate(f"() => {{ {classes} }}") == seen[last]
    page.locator("[data-view=tokens]").click()
    assert question(window)["view"] == "tokens"
    window.open(f"{urlsplit(page.url).path}?color=advantage")
    picture(page, "tokens")
    assert page.evaluate(f"() => {{ {classes} }}") == seen["advantage"]


def test_all_values_of_a_token_are_told_on_hover_and_on_focus(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open(a_trace(window))
    answer = page.locator(".tokens").last.locator(".t")
    point_at(page, answer.nth(answer.count() // 2))  # the first ones open the turn and are not sampled
    tip = page.locator("#token-values")
    picture(page, "token")
    names = tip.locator("dt").all_inner_texts()
    assert {"token", "advantage", "engine log-prob", "learner log-prob", "importance ratio", "entropy (nats)"} <= set(
        names
    )
    values = dict(zip(names, tip.locator("dd").all_inner_texts(), strict=True))
    assert values["trained on"] == "yes" and float(values["engine log-prob"]) <= 0
    assert abs(float(values["learner log-prob"]) - float(values["engine log-prob"])) < 0.1
    page.mouse.move(2, 2)
    tip.wait_for(state="hidden")
    page.locator(".tokens .t[tabindex='0']").last.focus()
    tip.wait_for()
    before = tip.locator("dd").all_inner_texts()
    page.keyboard.press("ArrowRight")
    assert tip.locator("dd").all_inner_texts() != before
    page.keyboard.press("Escape")
    tip.wait_for(state="hidden")


def test_messages_are_folded_one_by_one_and_all_and_the_address_says_so(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open(a_trace(window))
    told, folded = page.locator(".message .halves:visible"), page.locator(".message.folded")
    number, first = page.locator(".message").count(), page.locator(".message").first
    assert number > 1 and told.count() == number and page.locator(".gist:visible").count() == 0
    page.keyboard.press("j")
    page.keyboard.press("f")
    assert folded.count() == 1 and told.count() == number - 1
    assert first.locator(".gist").inner_text().strip() in re.sub(r"\s+", " ", first.locator(".said").text_content())
    button = first.locator("[data-fold]")
    assert button.get_attribute("aria-expanded") == "false" and "message 0" in button.get_attribute("aria-label")
    button.click()
    assert folded.count() == 0 and "fold" not in question(window)
    page.get_by_role("button", name="Folded", exact=True).click()
    assert folded.count() == number and told.count() == 0 and question(window)["fold"] == "1"
    page.set_viewport_size({"width": 800, "height": 300})
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert page.evaluate(
        "[...document.querySelectorAll('.message')].every((each) => each.getBoundingClientRect().bottom < 0)"
    )
    page.keyboard.press("F")
    assert folded.count() == 0 and "fold" not in question(window), "below all messages too"
    page.keyboard.press("F")
    page.reload()
    assert folded.count() == number
    here = urlsplit(page.url).path
    page.locator("[data-next], [data-previous]").first.click()
    page.wait_for_url(lambda url: urlsplit(url).path != here)
    assert folded.count() == page.locator(".message").count() and question(window)["fold"] == "1"
    page.evaluate("location.hash = 'm1'")  # as a link to a message does
    page.locator("#m1:not(.folded)").wait_for()
    page.keyboard.press("F")
    assert folded.count() == 0 and "fold" not in question(window)


def test_a_list_is_walked_as_it_was_chosen_and_gone_back_to(demo: str, opened: Opened) -> None:
    window = opened(demo)
    address = "/runs/demo/steps/0?trained=yes&sort=reward&order=desc"
    listed = [each["trace_id"] for each in said(window, address)["traces"]["rows"]]
    page = window.open(address)
    page.locator("table.traces tbody a").first.click()
    for trace_id in listed[:3]:
        page.wait_for_url(f"**/traces/{trace_id}*")
        page.keyboard.press("]")
    page.wait_for_url(f"**/traces/{listed[3]}*")
    page.keyboard.press("u")
    page.wait_for_url("**/runs/demo/steps/0?*")
    assert question(window) == {"trained": "yes", "sort": "reward", "order": "desc"}


def test_a_trace_leads_to_its_row_of_the_batch_and_back(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open(a_trace(window))
    trace = urlsplit(page.url).path
    to_row = page.locator("main a[href*='/batch/']").first
    to_row.click()
    page.wait_for_url("**/runs/demo/steps/0/batch/*")
    picture(page, "row")
    back = page.locator(f"main a[href^='{trace}']").first
    back.click()
    page.wait_for_url(f"**{trace}*")


def test_a_run_is_compared_with_its_replay(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open("/")
    runs = {each["run"]: each for each in said(window, "/")["runs"]}
    fork = next(name for name, each in runs.items() if each["kind"] == "replay" and each["parent"] == "demo")
    page.get_by_label("compare demo as A", exact=True).check()
    page.get_by_label(f"compare {fork} as B", exact=True).check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url(f"**/compare?a=demo&b={fork}")
    picture(page, "compare")
    assert "algorithm" in page.locator("[data-live=config]").text_content()
    page.locator("table.steps tbody a").first.click()
    page.wait_for_url(f"**/compare/demo/{fork}/steps/*")
    picture(page, "compare-step")
    found = said(window, urlsplit(page.url).path)
    assert found


@pytest.mark.parametrize("kind", ["run", "step", "trace", "row", "compare"])
def test_a_saved_page_works_from_disk_and_asks_nobody(demo: str, opened: Opened, kind: str, tmp_path: Path) -> None:
    window = opened(demo)
    runs = said(window, "/")["runs"]
    fork = next(each["run"] for each in runs if each["parent"] == "demo")
    addresses: dict[str, Callable[[], str]] = {
        "run": lambda: "/runs/demo",
        "step": lambda: "/runs/demo/steps/0",
        "trace": lambda: a_trace(window),
        "row": lambda: "/runs/demo/steps/0/batch/0",
        "compare": lambda: f"/compare/demo/{fork}",
    }
    page = window.open(addresses[kind]())
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
    aims = {"run": "svg.chart", "step": "[data-tip]", "trace": ".tokens .t", "row": ".tok", "compare": "svg.chart"}
    told = [point_at(each, each.locator(aims[kind]).first) for each in (page, shown)]
    assert told[0] == told[1] != ""
    assert shown.locator("form.filters :is(input, select, button):enabled:visible").count() == 0
    if kind == "trace":
        shown.locator("select[data-colors]").select_option("entropy")
        assert shown.locator(".tokens .t[class*=' k']").count() > 0
    picture(shown, f"saved-{kind}")


def test_the_theme_is_chosen_and_kept(demo: str, opened: Opened) -> None:
    window = opened(demo, color_scheme="dark")
    page = window.open("/runs/demo")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    picture(page, "run-dark")
    button = page.get_by_role("button", name="Theme")
    button.click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light
    button.click()
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark  # it was chosen
    button.click()
    assert page.evaluate(ground) == light  # as the system has it


def test_everything_is_reached_by_keys_alone(demo: str, opened: Opened) -> None:
    window = opened(demo)
    page = window.open("/")
    press = page.keyboard.press
    place = page.evaluate("[...document.querySelectorAll('[data-row] a')].map((a) => a.textContent).indexOf('demo')")
    names = page.locator("[data-row]").locator("td.name > a").all_inner_texts()
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
    page.locator("svg.chart").first.focus()
    press("ArrowRight")
    press("Enter")
    page.wait_for_url("**/runs/demo/steps/*")
    here = int(urlsplit(page.url).path.rpartition("/")[2])
    press("]")
    page.wait_for_url(f"**/runs/demo/steps/{here + 1}*")
    press("[")
    page.wait_for_url(f"**/runs/demo/steps/{here}*")
    press("/")
    assert page.evaluate("document.activeElement.name") == "search"
    page.keyboard.type("j[u?/")
    assert page.locator("[data-search]").input_value() == "j[u?/"
    press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    press("u")
    page.wait_for_url("**/runs/demo")
    press("u")
    page.wait_for_url(f"{demo}/")


def test_pages_work_without_scripts(demo: str, opened: Opened) -> None:
    window = opened(demo, java_script_enabled=False)
    page = window.open("/runs/demo/steps/0")
    page.locator("form.filters select[name=trained]").select_option("yes")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**trained=yes*")
    page.locator("table.traces tbody a").first.click()
    page.wait_for_url("**/runs/demo/traces/**")
    page.locator("select[data-colors]").select_option("entropy")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**color=entropy*")
    assert page.locator(".tokens .t[class*=' k']").count() > 0

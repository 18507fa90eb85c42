"""A person reads a trace of the demo in a real browser: its tokens and messages, the list it came from, its row."""

import re
from urllib.parse import urlsplit

import pytest

from tests.browser.viewing import a_trace, picture, point_at, question, said

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def test_tokens_change_their_colours_and_the_address_says_which(demo, opened):
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


def test_all_values_of_a_token_are_told_on_hover_and_on_focus(demo, opened):
    window = opened(demo)
    page = window.open(a_trace(window))
    answer = page.locator(".tokens").last.locator(".t")
    point_at(
        page, answer.nth(answer.count() - 2)
    )  # before the last one; the first ones open the turn and are not sampled
    tip = page.locator("#tip")
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


def test_the_traces_of_a_step_are_walked_and_gone_back_to(demo, opened):
    window = opened(demo)
    listed = [each["trace_id"] for each in said(window, "/runs/demo/steps/0")["traces"]["rows"]]
    page = window.open("/runs/demo/steps/0")
    page.locator("table.traces tbody a").first.click()
    for trace_id in listed[:3]:
        page.wait_for_url(f"**/traces/{trace_id}*")
        page.keyboard.press("]")
    page.wait_for_url(f"**/traces/{listed[3]}*")
    page.keyboard.press("u")
    page.wait_for_url("**/runs/demo/steps/0")


def test_a_trace_leads_to_its_row_of_the_batch_and_back(demo, opened):
    window = opened(demo)
    page = window.open(a_trace(window))
    trace = urlsplit(page.url).path
    to_row = page.locator("main a[href*='/batch?row=']").first
    to_row.click()
    page.wait_for_url("**/runs/demo/steps/0/batch?row=*")
    picture(page, "row")
    back = page.locator(f"main a[href^='{trace}']").first
    back.click()
    page.wait_for_url(f"**{trace}*")

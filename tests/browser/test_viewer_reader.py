"""A person reads what was said: by keys, side by side, and pointing at rollouts."""

import shlex
from pathlib import Path

import pytest

from flows import cli
from tests.browser.viewing import picture, question, said, viewer
from tests.fixtures.cheating import HACK, LEARNT, STEPS, cheated_store

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
STEP = "/runs/demo/steps/0"
FOCUSED = "document.activeElement.closest('.reply')?.querySelector('.big')?.getAttribute('href')"


def test_replies_are_read_by_keys(demo, opened):
    page = opened(demo).open(f"{STEP}?k=4")
    press = page.keyboard.press
    links = [each.get_attribute("href") for each in page.locator(".reply .big").all()]
    assert len(links) == 4
    for place in (0, 1, 2):
        press("j")
        assert page.evaluate(FOCUSED) == links[place]
    press("k")
    assert page.evaluate(FOCUSED) == links[1]
    press("n")
    page.wait_for_url("**read=2*")
    press("p")
    page.wait_for_url("**read=1*")


def test_the_lowest_of_a_figure_are_asked_for_without_an_address(demo, opened):
    window = opened(demo)
    page = window.open(STEP)
    form = page.locator("#read form")
    form.locator("input[name=k]").fill("3")
    form.locator("select[name=sort]").select_option("reward")
    page.wait_for_url("**sort=reward*")
    shown = page.locator(".reply .big").all_inner_texts()
    assert len(shown) == 3 and question(window)["k"] == "3"
    lowest = sorted(row["reward"] for row in said(window, STEP)["traces"]["rows"])[:3]
    assert [float(each) for each in shown] == pytest.approx(lowest, abs=1e-3)


def test_a_reward_hack_is_hunted_by_keys_in_five_steps(opened, tmp_path, capsys):
    """From the page of the run: what changed, the phrase, the first step with it; then the command that is shown."""
    store = cheated_store(tmp_path / "store")
    with viewer(Path(store.root.address)) as address:
        window = opened(address)
        page = window.open("/runs/base")
        page.get_by_role("link", name="What changed").press("Enter")
        page.wait_for_url("**/changes*")
        page.get_by_role("link", name=HACK, exact=True).press("Enter")
        page.wait_for_url("**/search*")
        picture(page, "hunted")
        page.locator("summary", has_text="in a terminal").press("Enter")
        command = shlex.split(page.locator("[data-command=quarantine]").inner_text())
        page.locator(".note a", has_text=f"step {LEARNT}").press("Enter")
        page.wait_for_url(f"**/steps/{LEARNT}")
        page.locator(".reply", has_text=HACK).first.wait_for()
    assert cli.main(command[1:]) == 0
    printed = capsys.readouterr().out
    assert f"num rollouts: {(STEPS - LEARNT) * 9}\nnum looked at: {STEPS * 12}\n" in printed

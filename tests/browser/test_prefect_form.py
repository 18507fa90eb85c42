"""A person at Prefect's pages, in a headless browser: fills in the form, reads a mistake, cancels a run, retries it.

Needs Chromium and the package `playwright`: `make test-browser`. Pictures are left in STAGECOACH_PICTURES, if set.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from storage.store import open_store
from tests.browser.viewing import picture
from tests.fixtures.serving import Serving, serving
from tests.fixtures.waiting import PATIENCE, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture(scope="module")
def page(served: Serving, chromium: Any) -> Iterator[Any]:
    opened = chromium.new_page(viewport={"width": 1280, "height": 1400})
    opened.set_default_timeout(PATIENCE * 1000)
    yield opened
    opened.close()


def field(page: Any, name: str) -> Any:
    """The part of the form for one parameter."""
    label = page.locator(".schema-form-property__label", has_text=re.compile(rf"^{name}\b"))
    return page.locator(".schema-form-property").filter(has=label)


def submit(page: Any, served: Serving, **parameters: Any) -> str:
    """Fill in the form of `sft` as a person does and send it; return the flow run's id.

    The page swallows a press while it still checks the fields, and Prefect's SQLite refuses a request now and then on a
    busy machine: a person tries again. A request that was sent is waited for: another one would be another run.
    """
    from playwright.sync_api import TimeoutError as NothingSent

    tried: list[str] = []
    deployment = served.ask("/deployments/name/sft/sft")
    for _ in range(5):
        page.goto(f"{served.url}/deployments/deployment/{deployment['id']}/run")
        page.get_by_text("weights to start from").wait_for()
        for name, value in parameters.items():
            enter(field(page, name), value)
        picture(page, "form")
        try:
            with page.expect_request(re.compile("/create_flow_run$"), timeout=30_000) as sent:
                page.get_by_role("button", name="Submit").click()
        except NothingSent:
            tried.append("nothing was sent")
            continue
        answer = sent.value.response()
        if answer is not None and answer.ok:
            return str(answer.json()["id"])
        tried.append(f"status {answer.status}: {answer.text()[:500]}" if answer else f"lost: {sent.value.failure}")
    raise AssertionError(f"the form was refused each time: {tried}\n{served.log()}")


def enter(part: Any, value: Any) -> None:
    """Put a value into its part of the form: a number, a text, or a list of texts."""
    if isinstance(value, int):
        part.get_by_role("button", name="int", exact=True).click()
    fields = part.locator("textarea, input")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(value, list):
            already = fields.count()
            part.get_by_role("button", name="Add item").click()
            fields.nth(already).wait_for()  # else the item before would be written over
        fields.last.fill(str(item))


def press(page: Any, served: Serving, flow_run: str, name: str) -> None:
    """Press a button of a flow run's page, and agree."""
    page.goto(f"{served.url}/runs/flow-run/{flow_run}")
    page.get_by_role("button", name=name).first.click()
    page.locator(".p-modal").get_by_role("button", name=re.compile(f"Confirm|{name}")).last.click()


def test_a_run_is_started_through_the_form_and_its_page_names_run_and_store(page: Any, served: Serving) -> None:
    flow_run = submit(page, served, **served.of_the_tiny_model(name="typed", steps=2))
    assert served.ended(flow_run)[0] == "COMPLETED"
    assert served.ask(f"/flow_runs/{flow_run}")["parameters"]["steps"] == 2
    assert [event.event for event in open_store(served.store).runs.events("typed")] == ["started", "finished"]
    page.goto(f"{served.url}/runs/flow-run/{flow_run}")
    page.get_by_text("sft-typed").first.wait_for()
    page.get_by_text("run:typed").first.wait_for()
    page.get_by_text("training-1").first.wait_for()
    picture(page, "run")
    page.get_by_role("tab", name="Artifacts").or_(page.locator(".p-tab", has_text="Artifacts")).first.click()
    page.get_by_text("run-typed").first.wait_for()
    picture(page, "artifacts")


def test_a_mistake_is_explained_on_the_runs_page(page: Any, served: Serving) -> None:
    flow_run = submit(page, served, name="mistaken", overrides=["training.lerning_rate=1"])
    assert served.ended(flow_run)[0] == "FAILED"
    page.goto(f"{served.url}/runs/flow-run/{flow_run}")
    page.get_by_text("Nothing was started").or_(page.get_by_text("nothing was started")).first.wait_for()
    picture(page, "mistake")


def test_cancel_and_retry_in_the_pages(page: Any, served: Serving) -> None:
    flow_run = submit(page, served, **served.of_the_tiny_model(name="long", steps=4000))
    store = open_store(served.store)
    until(lambda: len(store.ledger.entries(run="long", stage="training")) > 1, served.log)
    press(page, served, flow_run, "Cancel")
    assert served.ended(flow_run, "CANCELLED")[0] == "CANCELLED"
    done = len(store.ledger.entries(run="long", stage="training"))
    picture(page, "cancelled")
    served.settled(flow_run)
    press(page, served, flow_run, "Retry")
    until(lambda: len(store.ledger.entries(run="long", stage="training")) > done, served.log)
    assert [event.event for event in store.runs.events("long")] == ["started", "cancelled", "resumed"]
    press(page, served, flow_run, "Cancel")
    assert served.ended(flow_run, "CANCELLED")[0] == "CANCELLED"

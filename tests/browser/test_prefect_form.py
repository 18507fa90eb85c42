"""A person at Prefect's pages, in a headless browser: fills in the form, reads a mistake, cancels a run, retries it.

Needs Chromium and the package `playwright`: `make test-browser`. Pictures are left in STAGECOACH_PICTURES, if set.
"""

import re

import pytest

from storage.store import open_store
from tests.browser.viewing import picture
from tests.fixtures.serving import serving
from tests.fixtures.waiting import PATIENCE, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture(scope="module")
def page(served, chromium):
    opened = chromium.new_page(viewport={"width": 1280, "height": 1400})
    opened.set_default_timeout(PATIENCE * 1000)
    yield opened
    opened.close()


def field(page, name):
    """The part of the form for one parameter."""
    label = page.locator(".schema-form-property__label", has_text=re.compile(rf"^{name}\b"))
    return page.locator(".schema-form-property").filter(has=label)


def submit(page, served, **parameters):
    """Fill in the form of `sft` as a person does and send it; return the flow run's id.

    The page swallows a press while it still checks the fields, and Prefect's SQLite refuses a request now and then on a
    busy machine: a person tries again. A request that was sent is waited for: another one would be another run.
    """
    from playwright.sync_api import TimeoutError as NothingSent

    tried = []
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


def enter(part, value):
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


def show_run(page, served, flow_run, *texts):
    """Open a flow run's page and wait for texts on it."""
    page.goto(f"{served.url}/runs/flow-run/{flow_run}")
    for text in texts:
        page.get_by_text(text).first.wait_for()


def open_tab(page, name):
    page.get_by_role("tab", name=name).or_(page.locator(".p-tab", has_text=name)).first.click()


def press(page, served, flow_run, name):
    """Press a button of a flow run's page, and agree."""
    show_run(page, served, flow_run)
    page.get_by_role("button", name=name).first.click()
    page.locator(".p-modal").get_by_role("button", name=re.compile(f"Confirm|{name}")).last.click()


def test_a_run_is_started_through_the_form_and_its_page_names_run_and_store(page, served):
    flow_run = submit(page, served, **served.of_the_tiny_model(name="typed", steps=2))
    assert served.ended(flow_run)[0] == "COMPLETED"
    assert served.ask(f"/flow_runs/{flow_run}")["parameters"]["steps"] == 2
    assert [event.event for event in open_store(served.store).runs.events("typed")] == ["started", "finished"]
    show_run(page, served, flow_run, "sft-typed", "run:typed", "training-1")
    picture(page, "run")
    open_tab(page, "Artifacts")
    page.get_by_text("run-typed").first.wait_for()
    picture(page, "artifacts")
    page.get_by_text("run-typed").first.click()
    page.get_by_text("At a glance").first.wait_for()
    picture(page, "artifact")


def test_rare_fields_are_shown_to_who_asks_for_them(page, served):
    deployment = served.ask("/deployments/name/evaluate/evaluate")
    page.goto(f"{served.url}/deployments/deployment/{deployment['id']}/run")
    rare = field(page, "advanced")
    rare.wait_for()
    assert page.get_by_text("root of the store").count() == 0 and page.get_by_text("TOML files on").count() == 0
    rare.get_by_role("button", name="Advanced").click()
    page.get_by_text("root of the store").wait_for()
    assert page.get_by_text("TOML files on").count() == 1
    picture(page, "form-advanced")


def test_a_mistake_is_explained_on_the_runs_page(page, served):
    flow_run = submit(page, served, name="mistaken", overrides=["training.lerning_rate=1"])
    assert served.ended(flow_run)[0] == "FAILED"
    show_run(page, served, flow_run, "nothing was started")  # in any case of letters
    picture(page, "mistake")
    lines = served.ask("/logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}, limit=200)
    assert "Traceback" not in "".join(line["message"] for line in lines)


def test_cancel_and_retry_in_the_pages(page, served):
    flow_run = submit(page, served, **served.of_the_tiny_model(name="long", steps=4000))
    store = open_store(served.store)
    until(lambda: len(store.ledger.entries(run="long", stage="training")) > 1, served.log)
    press(page, served, flow_run, "Cancel")
    assert served.ended(flow_run, "CANCELLED")[0] == "CANCELLED"
    done = len(store.ledger.entries(run="long", stage="training"))
    served.settled(flow_run)
    show_run(page, served, flow_run)
    page.get_by_text("Cancelled", exact=True).first.wait_for()
    picture(page, "cancelled")
    press(page, served, flow_run, "Retry")
    until(lambda: len(store.ledger.entries(run="long", stage="training")) > done, served.log)
    assert [event.event for event in store.runs.events("long")] == ["started", "cancelled", "resumed"]
    show_run(page, served, flow_run, "Beginning flow run")
    picture(page, "retried")
    press(page, served, flow_run, "Cancel")
    assert served.ended(flow_run, "CANCELLED")[0] == "CANCELLED"

"""From a list that was filtered, searched and sorted through its traces one by one, and back to the list as it was."""

import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.app import respond
from flows.viewer.pages import step as step_page
from flows.viewer.pages import trace as trace_page
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import Elements
from tests.flows.viewer.stepped import HOSTILE, SAID, stepped

LISTED = "sort=reward&order=desc"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """A step of a trace for each of SAID, in whose order rewards rise."""
    return stepped(tmp_path_factory.mktemp("walk") / "store")


def asked_trace(trace_id: str, **query: str) -> PageRequest:
    return PageRequest(f"/runs/{RUN}/traces/{trace_id}", {"run": RUN, "trace": trace_id}, query)


def values(library: StoreReader, trace_id: str, status: int = 200, **query: str) -> dict[str, Any]:
    found = respond(trace_page.trace_page, library, asked_trace(trace_id, **query | {"format": "json"}))
    assert found.status_code == status, bytes(found.body).decode()
    read: dict[str, Any] = json.loads(bytes(found.body))
    return read


def links(library: StoreReader, trace_id: str, **query: str) -> list[str]:
    return aims(bytes(respond(trace_page.trace_page, library, asked_trace(trace_id, **query)).body).decode())


def aims(text: str) -> list[str]:
    return [value for _, name, value in Elements(text).values if name == "href"]


def test_a_list_leads_through_its_traces_in_its_order_and_ends(library: StoreReader) -> None:
    by_reward = list(SAID)[::-1]
    walked, here = [], by_reward[0]
    while here:
        walked.append(here)
        found = values(library, here, list=LISTED)
        assert (found["place"], found["num_traces"]) == (len(walked) - 1, len(SAID))
        assert found["previous"] == (walked[-2] if len(walked) > 1 else None)
        here = found["next"]
    assert walked == by_reward
    assert values(library, by_reward[0])["previous"] == by_reward[1], "without a list they are as they came"


def test_what_was_searched_for_is_walked_alone(library: StoreReader) -> None:
    found = values(library, "lines", list="search=S&trained=no&order=desc")
    holding = [name for name in list(SAID)[::-1] if "s" in (name + SAID[name]).casefold()]
    assert 1 < len(holding) < len(SAID)
    assert (found["place"], found["num_traces"]) == (holding.index("lines"), len(holding))


def test_the_list_goes_along_and_is_the_way_up(library: StoreReader) -> None:
    up = addresses.step(RUN, 0, sort="reward", order="desc")
    assert up in links(library, "greek", list=LISTED)
    (onward,) = [each for each in links(library, "greek", list=LISTED) if "/percent?" in each and "list=" in each]
    assert dict(parse_qsl(urlsplit(onward).query))["list"] == LISTED
    assert addresses.step(RUN, 0) in links(library, "greek")


def test_the_list_of_a_step_says_what_it_was_asked_for(library: StoreReader) -> None:
    query = {"sort": "reward", "order": "desc", "page": "1", "size": "3", "columns": "reward", "group_sort": "mean"}
    asked = PageRequest(f"/runs/{RUN}/steps/0", {"run": RUN, "step": "0"}, query)
    text = bytes(respond(step_page.step_page, library, asked).body).decode()
    of_list = [each for each in aims(text) if "/traces/" in each and "list=" in each]
    assert len(of_list) == 3
    assert {dict(parse_qsl(urlsplit(each).query))["list"] for each in of_list} == {LISTED}
    plain = bytes(respond(step_page.step_page, library, PageRequest(asked.address, asked.path)).body).decode()
    assert "list=" not in plain, "an address says no more than was asked"


@pytest.mark.parametrize("stale", ["outcome=errored", "nonsense", "page=9", "sort=reward&group=g2", HOSTILE])
def test_a_list_without_the_trace_counts_as_none(library: StoreReader, stale: str) -> None:
    found = values(library, "plain", list=stale)
    assert (found["place"], found["num_traces"], found["walking"]) == (0, len(SAID), {})
    assert not [each for each in links(library, "plain", list=stale) if "list=" in each and "/traces/percent" in each]


def test_a_list_of_what_is_not_known_is_refused(library: StoreReader) -> None:
    assert "rewrd" in str(values(library, "plain", status=400, list="sort=rewrd"))


def test_a_saved_list_says_what_was_chosen_and_asks_for_nothing(library: StoreReader) -> None:
    query = {"search": "quick", "format": "file"}
    asked = PageRequest(f"/runs/{RUN}/steps/0", {"run": RUN, "step": "0"}, query)
    found = Elements(bytes(respond(step_page.step_page, library, asked).body).decode())
    assert ("fieldset", "disabled", "") in found.values and ("input", "value", "quick") in found.values
    assert not [tag for tag, name, value in found.values if (name, value) == ("type", "submit")]


def test_filters_keep_the_page_of_groups(library: StoreReader) -> None:
    asked = PageRequest(f"/runs/{RUN}/steps/0", {"run": RUN, "step": "0"}, {"group_page": "1", "group_sort": "mean"})
    text = bytes(respond(step_page.step_page, library, asked).body).decode()
    named = {value for tag, name, value in Elements(text).values if tag == "input" and name == "name"}
    assert {"group_page", "group_sort", "search"} == named

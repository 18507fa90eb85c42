"""From a list that was filtered, searched and sorted through its traces one by one, and back to the list as it was."""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tests.flows.viewer import looking
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import Elements
from tests.flows.viewer.stepped import HOSTILE, SAID, stepped

GREEK = addresses.trace(RUN, "greek")
LISTED = "sort=reward&order=desc"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """A step of a trace for each of SAID, in whose order rewards rise."""
    return stepped(tmp_path_factory.mktemp("walk") / "store")


def values(library: StoreReader, trace_id: str, **query: str) -> dict[str, Any]:
    return looking.values(library, addresses.trace(RUN, trace_id), **query)


def links(library: StoreReader, address: str, **query: str) -> list[str]:
    _, text = looking.answer(library, address, **query)
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
    assert up in links(library, GREEK, list=LISTED)
    (onward,) = [each for each in links(library, GREEK, list=LISTED) if "/percent?" in each and "list=" in each]
    assert dict(parse_qsl(urlsplit(onward).query))["list"] == LISTED
    assert addresses.step(RUN, 0) in links(library, GREEK)


def test_the_list_of_a_step_says_what_it_was_asked_for(library: StoreReader) -> None:
    query = {"sort": "reward", "order": "desc", "page": "1", "size": "3", "columns": "reward", "group_sort": "mean"}
    step = addresses.step(RUN, 0)
    of_list = [each for each in links(library, step, **query) if "/traces/" in each and "list=" in each]
    assert len(of_list) == 3
    assert {dict(parse_qsl(urlsplit(each).query))["list"] for each in of_list} == {LISTED}
    assert "list=" not in " ".join(links(library, step)), "an address says no more than was asked"


@pytest.mark.parametrize("stale", ["outcome=errored", "nonsense", "page=9", "sort=reward&group=g2", HOSTILE])
def test_a_list_without_the_trace_counts_as_none(library: StoreReader, stale: str) -> None:
    found = values(library, "plain", list=stale)
    assert (found["place"], found["num_traces"], found["walking"]) == (0, len(SAID), {})
    onward = links(library, addresses.trace(RUN, "plain"), list=stale)
    assert not [each for each in onward if "list=" in each and "/traces/percent" in each]


def test_a_list_of_what_is_not_known_is_refused(library: StoreReader) -> None:
    status, text = looking.answer(library, addresses.trace(RUN, "plain"), list="sort=rewrd")
    assert status == 400 and "rewrd" in text


def test_filters_keep_the_page_of_groups(library: StoreReader) -> None:
    _, text = looking.answer(library, addresses.step(RUN, 0), group_page="1", group_sort="mean")
    named = {value for tag, name, value in Elements(text).values if tag == "input" and name == "name"}
    assert {"group_page", "group_sort", "search"} == named

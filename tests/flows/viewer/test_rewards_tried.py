"""The page of the rewards that were tried on a run."""

import polars as pl
import pytest

from flows.queries.request import NotThere, PageRequest
from flows.queries.reward_figures import keep_figures, try_figures
from flows.queries.reward_try import SCHEMA
from flows.queries.store_reader import StoreReader
from flows.viewer.pages.rewards import rewards_page
from flows.viewer.rendering import as_html
from tests.fixtures import rehearsal


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    rehearsal.rehearse(root, "base")
    return StoreReader.at(root)


def request(name=""):
    return PageRequest("/runs/base/rewards", {"run": "base"}, {"name": name} if name else {})


def test_a_try_has_its_page_and_the_run_leads_to_it(reader):
    with pytest.raises(NotThere, match="stagecoach reward try FUNCTION base"):
        rewards_page(reader, request())
    row = {"run": "base", "step": 0, "trace_id": "t<0>", "group_id": "g", "recorded": 0.0, "score": 1.0, "reward": 1.0}
    rows = pl.DataFrame([row, row | {"trace_id": "t1", "recorded": 1.0, "reward": 2.0}], schema=SCHEMA)
    figures = try_figures(rows, 1.0) | {"replaces": False}
    keep_figures(reader.store.root, "base", "short", figures)
    text = as_html(rewards_page(reader, request()), request()).decode()
    assert "now right" in text and "t&lt;0&gt;" in text and "Rewards tried" in text
    with pytest.raises(NotThere, match="those that were: short"):
        rewards_page(reader, request("long"))

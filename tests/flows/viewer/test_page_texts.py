"""Words on pages: the way to each page, the titles of measurements, and settings as a config file has them."""

import re

import pytest

from flows.queries.charts import charts
from flows.queries.metrics import StepNumbers
from tasks.metrics.figures import ALL
from tests.flows.viewer.looking import answer, one_of_each, pluck


@pytest.fixture(scope="module")
def pages(forked):
    """The text of a page of each kind, of a run of two steps and its fork."""
    found = {}
    for name, address in one_of_each(forked).items():
        status, found[name] = answer(forked, address)
        assert status == 200
    return found


def test_the_way_to_every_page_begins_at_the_runs(pages):
    assert {"run", "step", "batch", "trace", "search", "compare"} <= set(pages)
    for name, text in pages.items():
        way = re.findall(
            r">\s*([^<>]+?)\s*</(?:a|h1)>", text.partition('<nav class="crumbs"')[2].partition("</nav>")[0]
        )
        assert way[0] == "Runs" and way.count("Runs") == 1, name
        assert name == "runs" or len(way) > 1, name


def test_a_batch_and_its_step_call_what_was_measured_the_same(pages):
    for title in ("Loss", "RL component", "Gradient norm", "Mismatch KL", "Masked share", "Learning rate"):
        assert f"<dt>{title}</dt>" in pages["step"] and f"<dt>{title}</dt>" in pages["batch"], title
    for raw in ("grad norm", "rl loss", "mismatch kl", "masked fraction"):
        assert raw not in pages["batch"], raw


def test_a_setting_is_written_as_a_config_file_has_it(pages):
    (row,) = re.findall(r'<td class="mono">.*algorithm\.type.*', pages["compare"])
    assert "&#34;grpo&#34;" in row and "&#34;rloo&#34;" in row
    assert ">False<" not in pages["compare"] and ">false<" in pages["compare"]


def test_what_filters_took_is_named_beside_each_filter():
    values = {(ALL, f"filters/{name}"): 0.5 for name in ("is_filtered", "zero_advantage")}
    # Charts look at the numbers alone, not at the work.
    (found,) = (chart for section in charts([StepNumbers(None, values)], []) for chart in section["charts"])
    assert pluck(found["series"], "name") == ["left out", "zero_advantage"]

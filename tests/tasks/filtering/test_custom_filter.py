"""A filter of one's own: what it is given, what it finds, what cannot be a finding."""

import pytest

from configs.checks.run import problems
from configs.errors import ConfigError
from configs.filters import RESERVED_NAMES
from configs.load import load
from configs.resolve import resolve
from flows.runtime.machine_facts import function_facts
from tasks.filtering.filters import FILTERS
from tasks.filtering.filters.custom import NoFinding
from tasks.filtering.stage import STAGE
from tasks.runtime.imports import NotImportable
from tests.fixtures import stages
from tests.fixtures.builders import exchange, table, trace, view
from tests.fixtures.stages import filtering

SECTION = {"type": "custom", "name": "short", "function": "short_filter:short"}
FOUND = """
def short(material, most=1):
    counts = material.traces["num_output_tokens"].to_pylist()
    return {row: {"tokens": count} for row, count in enumerate(counts) if count <= most}

def alone(material):
    return {row: {} for row in range(material.traces.num_rows) if material.standing[row]}

def careless(material, rows):
    material.standing[:] = False
    material.owner[:] = 0
    return {rows.pop(): {}}

def wrong(material, answer):
    return {"a list": [0], "outside": {1: {}}, "not plain": {0: {"x": object()}}, "nan": {0: {"x": float("nan")}},
            "text": {0: "short"}}[answer]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "short_filter.py").write_text(FOUND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "short_filter", raising=False)


def judged(filters, *traces):
    return [*stages.judged(traces, filters=[{"type": "errored"}, *filters]).values()]


def test_it_records_under_its_name_and_excludes_where_it_enforces():
    rows = [trace("a", num_output_tokens=1), trace("b", num_output_tokens=4)]
    recorded = judged([SECTION], *rows)
    assert [row["detected"] for row in recorded] == [["short"], []] and all(row["keep"] for row in recorded)
    assert recorded[0]["evidence"] == {"short": {"tokens": 1}}
    enforced = judged([SECTION | {"enforce": True, "arguments": {"most": 4}}], *rows)
    assert [row["reason"] for row in enforced] == ["short", "short"]


def test_one_of_groups_looks_at_what_others_left():
    alone = {"type": "custom", "name": "alone", "function": "short_filter:alone", "enforce": True}
    rows = [trace("a", num_output_tokens=1), trace("b")]
    first = {"type": "custom", "name": "first", "function": "short_filter:short", "enforce": True}
    assert [row["detected"] for row in judged([first, alone], *rows)] == [["first", "alone"], ["alone"]]
    last = alone | {"of_groups": True}
    assert [row["detected"] for row in judged([first, last], *rows)] == [["first"], ["alone"]]


def test_it_is_told_who_stands_before_any_filter_looked():
    alone = {"type": "custom", "name": "alone", "function": "short_filter:alone"}
    rows = [trace("a"), trace("b", trainable=False)]
    assert [row["detected"] for row in judged([alone], *rows)] == [["alone"], []]


def test_what_it_does_to_its_arguments_is_its_own_affair():
    section = SECTION | {"function": "short_filter:careless", "arguments": {"rows": [0, 1]}}
    rows = [trace("a", reward=0.0), trace("b", reward=0.0)]
    tables = {"traces": table("traces", rows), "messages": table("messages", [*exchange("a"), *exchange("b")])}
    filters = [{"type": "errored"}, section | {"of_groups": True}, {"type": "zero_advantage"}]
    config = view(STAGE, filtering={"filters": filters})
    for _ in range(2):
        found = filtering(tables, config)["verdicts"].to_pylist()
        assert [row["detected"] for row in found] == [["zero_advantage"], ["short", "zero_advantage"]]
    given = stages.material(("a", "b"), ("c", "d"))
    FILTERS["custom"].detect(given, config.filtering.filters[1])
    assert given.owner.tolist() == [0, 0, 1, 1] and given.standing.all()


def test_other_code_than_the_config_was_resolved_with_is_refused():
    with pytest.raises(NotImportable, match="was resolved with sha256:other"):
        judged([SECTION | {"version": "sha256:other"}], trace("a"))


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("a list", "returned list, not a dictionary"),
        ("outside", "names row 1 of 1 traces"),
        ("not plain", "gave evidence that JSON cannot hold"),
        ("nan", "gave evidence that JSON cannot hold"),
        ("text", "gave str for row 0"),
    ],
)
def test_what_cannot_be_a_finding_stops_the_stage(answer, what):
    section = SECTION | {"function": "short_filter:wrong", "arguments": {"answer": answer}}
    said = (
        r"Nothing was filtered or trained; all that was sampled is safe\. Correct the function \(its code is part of "
        r"the key\) and go on under a new name, or replay the run from filtering\.\Z"
    )
    with pytest.raises(NoFinding, match=rf"\Afilter 'short': short_filter:wrong {what}.*\. {said}"):
        judged([section], trace("a"))


def test_its_code_is_in_the_key_and_has_to_load():
    listed = 'filtering.filters=[{{type="errored"}}, {{type="custom", name="s", function="{}"}}]'
    config = load(["demo"], [listed.format("short_filter:short")])
    versions = function_facts(config)
    assert list(versions) == ["filtering.filters.1.function"]
    assert versions["filtering.filters.1.function"].startswith("sha256:")
    resolved = resolve(config, {"functions": versions})
    assert resolved.filtering.filters[1].version == versions["filtering.filters.1.function"]
    missing = load(["demo"], [listed.format("nowhere:f")])
    with pytest.raises(ConfigError, match=r"filtering\.filters\.1\.function: 'nowhere:f'"):
        function_facts(missing)


def test_two_of_one_name_are_refused():
    two = [{"type": "errored"}, SECTION, SECTION | {"function": "short_filter:alone"}]
    config = load(["demo"]).model_copy(update={"filtering": view(STAGE, filtering={"filters": two}).filtering})
    assert "filtering.filters: 'short' is there 2 times" in problems(config)


@pytest.mark.parametrize("name", ["quarantined", "untrainable", "is_filtered", "errored", "gibberish"])
def test_a_name_with_a_meaning_of_its_own_is_refused(name):
    named = f'filtering.filters=[{{type="errored"}}, {{type="custom", name="{name}", function="m:f"}}]'
    with pytest.raises(ConfigError, match=rf"filtering\.filters\.1\.name: '{name}' has a meaning of its own"):
        load(["demo"], [named])


def test_every_filter_keeps_its_name_for_itself():
    assert set(FILTERS) < RESERVED_NAMES

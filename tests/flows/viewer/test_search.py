"""Search over a run and what changed between policies, as pages; and the hunt for a planted reward hack."""

import json
import re
import shlex
from html import escape, unescape
from pathlib import Path

import pytest

from flows import cli
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tests.fixtures.cheating import HACK, LEARNT, STEPS, cheated_store
from tests.fixtures.replays import ask, walk
from tests.flows.viewer.looking import answer, pluck, values


@pytest.fixture(scope="module")
def cheated(tmp_path_factory):
    """A run whose model learns to cheat at step LEARNT."""
    return cheated_store(tmp_path_factory.mktemp("cheated") / "store")


@pytest.fixture
def library(cheated):
    return StoreReader.at(cheated.root.address)


def linked(page, words):
    """Where the first link of some words leads."""
    links = re.findall(r'<a\b[^>]*?href="([^"]*)"[^>]*>(.*?)</a>', page, re.DOTALL)
    return next(unescape(address) for address, text in links if re.sub("<.*?>", "", text).strip() == escape(words))


def test_a_reward_hack_is_hunted_down(cheated, capsys):
    root = Path(cheated.root.address)
    reader = StoreReader.at(root)
    pages = [answer(reader, "/runs/base")[1]]
    for words in ("What changed", HACK, str(LEARNT)):
        status, page = answer(reader, linked(pages[-1], words))
        assert status == 200
        pages.append(page)
    _, changed, found, step = pages
    assert escape(HACK) in changed.split("Phrases lost")[0] and "<h1" in step
    assert f'first in <a href="/runs/base/steps/{LEARNT}">step {LEARNT}</a>' in found
    command = shlex.split(unescape(re.findall(r'data-command="quarantine"[^>]*>(.*?)</pre>', found, re.DOTALL)[0]))
    num_fooled = (STEPS - LEARNT) * 9
    assert cli.main(command[1:]) == 0
    printed = capsys.readouterr().out
    assert f"num rollouts: {num_fooled}\nnum looked at: {STEPS * 12}\n" in printed
    assert "stagecoach replay base --from filtering" in printed
    _, steps = walk(ask(root, name="clean", from_stage="filtering"))
    assert len(steps) == STEPS
    clean = StoreReader.at(root)
    left = values(clean, "/runs/clean/search", q=f"contains(reply, '{HACK}') and outcome = 'pending'")
    assert left["num_hits"] == 0, "none of them is in a batch of the replay"
    out = values(clean, "/runs/clean/search", q="outcome = 'quarantined'")
    assert out["num_hits"] == num_fooled and out["first_step"] == LEARNT


def test_the_rollouts_of_an_example_are_a_search(library):
    found = values(library, "/runs/base/search", q="reward > -1")["hits"][0]
    told = values(library, addresses.example("base", found["environment"], found["example_id"]))
    assert found["trace_id"] in pluck(told["hits"], "trace_id") and told["problem"] is None
    assert {*pluck(told["hits"], "example_id")} == {found["example_id"]} and told["num_hits"] % 4 == 0
    quoted = values(library, addresses.example("base", "it's", '"e"'))
    assert (quoted["num_hits"], quoted["problem"]) == (0, None)


def test_hits_are_paged(library):
    told = values(library, "/runs/base/search", q="reward > -1", page="4")
    assert (told["num_listed"], told["page_number"], told["num_pages"], len(told["hits"])) == (180, 4, 4, 30)
    first, last = (answer(library, "/runs/base/search", q="reward > -1", page=page)[1] for page in "14")
    shown = [{*re.findall(r'href="(/runs/base/traces/[^"]*)"', page)} for page in (first, last)]
    assert [*map(len, shown)] == [50, 30] and not shown[0] & shown[1]
    assert "page=2#hits" in first and "page=3#hits" in last


def test_every_printed_command_selects_the_hits(library, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = values(library, "/runs/base/search", q=f"reward > 0.8 and length < 20 and reply ~ '{HACK}'")
    assert told["num_hits"] == 27 and pluck(told["counts"], "num_hits") == [0] * LEARNT + [9, 9, 9]
    ids = {*pluck(told["hits"], "trace_id")}
    commands = {name: shlex.split(command)[1:] for name, command in told["commands"].items()}

    def printed(name, *options):
        assert cli.main([*commands[name], *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert {*printed("quarantine", "--dry-run")["trace_ids"]} == {*pluck(printed("sql"), "trace_id")} == ids
    listed = printed("traces")["traces"]
    assert {*pluck(listed["rows"], "trace_id")} == ids and listed["columns"][1]["name"] == "step"
    assert cli.main(commands["export"]) == 0
    lines = Path("hits.jsonl").read_text().splitlines()
    assert len(lines) == 27 and all(HACK in line for line in lines)

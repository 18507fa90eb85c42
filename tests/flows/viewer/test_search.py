"""Search over a run and what changed between policies, as pages; and the hunt for a planted reward hack."""

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from flows import cli
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tests.fixtures.cheating import HACK, LEARNT, STEPS, cheated_store
from tests.fixtures.replays import ask, walk
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import answer, values, visitor
from tests.flows.viewer.stepped import stepped


@pytest.fixture(scope="module")
def cheated(tmp_path_factory):
    """A run whose model learns to cheat at step LEARNT."""
    return cheated_store(tmp_path_factory.mktemp("cheated") / "store")


class Links(HTMLParser):
    """The links of a page with their words, and its commands by name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self.commands: dict[str, str] = {}
        self._open: tuple[dict[str, str], str] | None = None
        self._words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self._open, self._words = (self.links, str(given["href"])), ""
        if given.get("data-command"):
            self._open, self._words = (self.commands, str(given["data-command"])), ""

    def handle_data(self, data: str) -> None:
        self._words += data

    def handle_endtag(self, tag: str) -> None:
        if self._open is not None and tag in ("a", "pre"):
            found, name = self._open
            if tag == "a":
                found.setdefault(self._words.strip(), name)
            else:
                found[name] = self._words
            self._open = None


class Clicker:
    """Somebody who looks at pages and follows their links."""

    def __init__(self, client: TestClient, address: str) -> None:
        self.client, self.num_clicks = client, 0
        self.page = self.open(address)

    def open(self, address: str) -> str:
        got = self.client.get(address.partition("#")[0])
        assert got.status_code == 200, got.text
        return got.text

    def click(self, words: str) -> str:
        self.num_clicks += 1
        self.page = self.open(Links(self.page).links[words])
        return self.page


def test_a_reward_hack_is_hunted_down(cheated, capsys):
    root = Path(cheated.root.address)
    person = Clicker(visitor(root), addresses.run("base"))
    changed = person.click("What changed")
    gained = re.findall(r'<a class="mono" href="[^"]*"[^>]*>([^<]*)</a>', changed.split("Phrases lost")[0])
    phrase = next(each for each in gained if "rev" in each).replace("&lt;", "<").replace("&gt;", ">")
    assert phrase == HACK
    found = person.click(phrase)
    assert f'first in <a href="/runs/base/steps/{LEARNT}">step {LEARNT}</a>' in found
    step = person.click(str(LEARNT))
    assert "<h1" in step and person.num_clicks <= 5
    command = shlex.split(Links(found).commands["quarantine"])
    num_fooled = (STEPS - LEARNT) * 9
    assert cli.main(command[1:]) == 0
    printed = capsys.readouterr().out
    assert f"num rollouts: {num_fooled}\nnum looked at: {STEPS * 12}\n" in printed
    assert "stagecoach replay base --from filtering" in printed
    _, steps = walk(ask(root, name="clean", from_stage="filtering"))
    assert len(steps) == STEPS
    clean = StoreReader.at(root)
    left = values(clean, addresses.search("clean", f"contains(reply, '{HACK}') and outcome = 'pending'"))
    assert left["num_hits"] == 0, "none of them is in a batch of the replay"
    out = values(clean, addresses.search("clean", "outcome = 'quarantined'"))
    assert out["num_hits"] == num_fooled and out["first_step"] == LEARNT


def test_the_rollouts_of_an_example_are_a_search(cheated):
    library = StoreReader.at(cheated.root.address)
    found = values(library, addresses.search("base", "reward > -1"))["hits"][0]
    told = values(library, addresses.example("base", found["environment"], found["example_id"]))
    assert found["trace_id"] in {hit["trace_id"] for hit in told["hits"]} and told["problem"] is None
    assert {hit["example_id"] for hit in told["hits"]} == {found["example_id"]} and told["num_hits"] % 4 == 0
    quoted = values(library, addresses.example("base", "it's", '"e"'))
    assert (quoted["num_hits"], quoted["problem"]) == (0, None)


def test_hits_are_paged(cheated):
    library = StoreReader.at(cheated.root.address)
    first, last = addresses.search("base", "reward > -1"), addresses.search("base", "reward > -1") + "&page=4"
    told = values(library, last)
    assert (told["num_listed"], told["page_number"], told["num_pages"], len(told["hits"])) == (180, 4, 4, 30)
    shown = [set(re.findall(r'href="(/runs/base/traces/[^"]*)"', answer(library, each)[1])) for each in (first, last)]
    assert [len(each) for each in shown] == [50, 30] and not shown[0] & shown[1]
    assert "page=2#hits" in answer(library, first)[1] and "page=3#hits" in answer(library, last)[1]


def test_every_printed_command_selects_the_hits(cheated, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = StoreReader.at(cheated.root.address)
    told = values(library, addresses.search("base", f"reward > 0.8 and length < 20 and reply ~ '{HACK}'"))
    assert told["num_hits"] == 27 and [each["num_hits"] for each in told["counts"]] == [0] * LEARNT + [9, 9, 9]
    ids = {hit["trace_id"] for hit in told["hits"]}
    commands = {name: shlex.split(command)[1:] for name, command in told["commands"].items()}
    assert cli.main([*commands["quarantine"], "--dry-run", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["trace_ids"]) == ids
    assert cli.main([*commands["sql"], "--json"]) == 0
    assert {row["trace_id"] for row in json.loads(capsys.readouterr().out)} == ids
    assert cli.main([*commands["traces"], "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["traces"]
    assert {row["trace_id"] for row in listed["rows"]} == ids and listed["columns"][1]["name"] == "step"
    assert cli.main(commands["export"]) == 0
    lines = Path("hits.jsonl").read_text().splitlines()
    assert len(lines) == 27 and all(HACK in line for line in lines)


def test_what_changed_between_two_policies(cheated):
    library = StoreReader.at(cheated.root.address)
    told = values(library, addresses.changes("base", 0, LEARNT))
    assert told["counts"] == [12, 12]
    assert (told["gained"][0]["a"], told["gained"][0]["b"]) == (0, 9) and HACK in told["gained"][0]["phrase"]
    same = values(library, addresses.changes("base", 3, 3))
    assert same["gained"] == same["lost"] == []
    status, text = answer(library, addresses.changes("base", 0, 99))
    assert status == 404 and "policy 99 sampled no rollout" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [("rewrd > 0.8", "nearest columns are reward"), ("reward >", "syntax error"), ("reply ~ '('", "missing")],
)
def test_a_wrong_condition_is_explained_beside_the_field(tmp_path, text, said):
    library = stepped(tmp_path / "store")
    told = values(library, addresses.search(RUN, text))
    assert said in told["problem"] and told["q"] == text
    assert answer(library, addresses.search(RUN, text))[0] == 200


def test_the_search_field_of_a_run_leads_to_the_page(tmp_path):
    library = stepped(tmp_path / "store")
    page = answer(library, addresses.run(RUN))[1]
    assert f'action="{addresses.search(RUN)}"' in page
    assert values(library, f"{addresses.search(RUN)}?{urlencode({'q': ''})}")["condition"] is None

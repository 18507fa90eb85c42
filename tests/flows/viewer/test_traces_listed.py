"""`stagecoach traces`: the same list as the page's, in lines that can be grepped, and nothing in it acts."""

import json
import re

import pytest

from flows.cli.trace import COLOURS
from flows.queries.store_reader import StoreReader
from flows.viewer.terminal import MEASURES
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import values
from tests.flows.viewer.stepped import HOSTILE, SAID, begun, stepped

BROKEN = {"reward": None, "error_class": "timeout", "error_type": HOSTILE, "error_message": "too slow\nfor us"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("listed") / "store"
    stepped(place, hostile={"example_id": HOSTILE, "environment": "[b]x[/b]"}, silent=BROKEN)
    return place


@pytest.fixture
def lines(command, root):
    return lambda *arguments, store=root, status=0: command(store, "traces", *arguments, status=status).splitlines()


def ids(printed):
    """The ids of a list in a pipe, below its heading."""
    return [line.split("\t")[0] for line in printed[1:]]


def test_the_last_step_of_the_newest_run_unless_told(lines):
    assert ids(lines()) == ids(lines("latest", "--step", "1")) == ["later"]
    printed = lines(RUN, "--step", "0")
    assert ids(printed) == list(SAID)
    assert printed[0].split("\t")[:3] == ["trace_id", "reward", "group_id"]
    assert len({line.count("\t") for line in printed}) == 1


def test_json_is_that_of_the_page(lines, root):
    found = json.loads("".join(lines("--step", "0", "--sort", "reward", "--limit", "50", "--json")))
    page = values(StoreReader.at(root), f"/runs/{RUN}/steps/0", sort="reward")
    assert found["traces"] == page["traces"] and found["figures"] == page["figures"]


def test_nothing_acts_on_the_terminal(lines):
    columns = ("--columns", "error_message,error_type,example_id")
    for arguments in ((), ("--where", "prompt ~ 'bold red'"), columns):
        text = "\n".join(lines("--step", "0", *arguments))
        assert not {"\x1b", "\u202e", "\x00"} & set(text)
        assert text.count("\n") < 12
    assert "<script>alert(1)</script>[bold red]␛[31mred⟨U+202E⟩after␀" in text and "too slow⏎for us" in text


def test_a_terminal_gets_the_columns_that_it_has_room_for(lines, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for width in (20, 40, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        printed = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines("--step", "0")]
        assert max(map(len, printed)) <= width and sum(line.startswith("plain ") for line in printed) == 1
        assert any(line.startswith("trace ") for line in printed)
    assert printed[0].startswith("hand, step 0: reward 0.25 ± 0.171; ") and printed[-1] == "7 of 7 rollouts"
    assert printed[1].split()[-2:] == ["expected", "reply"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--where", "outcom = 'lost'"), "the condition \"outcom = 'lost'\" fails"),
        (("--sort", "beauty"), "there is no column 'beauty'; there are trace_id, reward"),
        (("--evaluation", "3"), "run 'hand' has no evaluation of policy 3; it has none at all"),
        (("--set", "small"), "--set chooses of an evaluation: name its policy's version with --evaluation"),
    ],
)
def test_mistakes_are_explained(lines, arguments, said):
    assert lines(*arguments, status=2)[0].startswith(f"stagecoach: {said}")


def test_the_help_names_every_measure():
    assert COLOURS.partition(": ")[2].split(", ") == [*MEASURES]


def test_a_run_that_has_just_begun(lines, tmp_path):
    begun(tmp_path / "store", 0)
    assert lines(store=tmp_path / "store", status=2) == ["stagecoach: run 'hand' has no rollouts yet"]
    begun(tmp_path / "store", 1)
    assert ids(lines(store=tmp_path / "store")) == ["p0-0", "p0-1"]


def test_a_step_is_named_with_its_run(lines):
    assert ids(lines(f"{RUN}:0")) == ids(lines(RUN, "--step", "0"))
    assert "a step is named RUN:STEP" in lines(f"{RUN}:x", status=2)[0]
    assert "leave out --step" in lines(f"{RUN}:0", "--step", "1", status=2)[0]

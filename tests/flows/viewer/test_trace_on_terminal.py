"""A trace on the terminal: what is told of it, in colours and without, and that no text of others acts there."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from configs.run import RunConfig
from flows import cli
from flows.cli.trace_parts import terminal, trace_parts
from flows.queries.store_reader import StoreReader
from flows.queries.trace import trace_use
from flows.viewer.terminal import MEASURES, STYLES
from tests.fixtures import builders
from tests.fixtures.hostile import ALL, acting
from tests.flows.viewer.hand_made import FORKED, PATHS, RUN, HandMade, batch, credit, forked, update

STREAMS: tuple[dict[str, list[float]], ...] = (
    {"advantages": [0, 0, 0, 0, 0.5, 0.5, 0, 0, 0], "rl_weights": [0, 0, 0, 0, 1, 1, 0, 0, 0]},
    {"advantages": [0, 0, 0, -0.25, -0.25], "rl_weights": [0, 0, 0, 1, 1]},
)
TOKENIZER = {f"<{number}>": number for number in range(16)}
ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with a trace of two branches that was trained on, one that failed, and one whose texts are hostile."""
    tmp_path = tmp_path_factory.mktemp("made")
    (tmp_path / "tokenizer").mkdir()
    Tokenizer(WordLevel(TOKENIZER, unk_token="<0>")).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    root = tmp_path / "store"
    hand = HandMade(root)
    config = RunConfig(name=RUN, store=str(root), model={"tokenizer": str(tmp_path / "tokenizer")})
    hand.store.runs.record(run=RUN, event="resumed", kind="train", config=config.model_dump(mode="json"))
    rewards = json.dumps({"answer": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.25, "weight": 2.0}, "x": None})
    failed = builders.failed("e" * 32, error_message="too slow", error_traceback="Traceback\n  a line\nTimeoutError: x")
    hostile = builders.trace("h" * 32, rewards=json.dumps({ALL: None}), stop_condition=ALL, example_id=ALL, agent=ALL)
    body = json.dumps({"role": "user", "content": ALL, "tool_calls": [{"name": ALL, "arguments": ALL}]})
    credits = [credit(FORKED, number, PATHS[number], STREAMS[number]) for number in (0, 1)]
    hand.step(
        [builders.trace(FORKED, rewards=rewards, num_branches=2), failed, hostile],
        [*forked(), builders.message("h" * 32, 0, role=ALL, content=ALL, body=body)],
        credits,
        batches=[batch(credits, scale=0.75)],
        updates=[update()],
    )
    return root


def printed(root: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["trace", *arguments, "--store", str(root)]) == 0
    return capsys.readouterr().out


def coloured(root: Path, trace_id: str, colour: str = "") -> str:
    library = StoreReader.at(root)
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100, markup=False)
    for part in trace_parts(library, trace_use(library, trace_id), "", colour, False, out):
        out.print(part)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in ESCAPE.sub("", text), "colours alone are escapes"
    return str(text)


def test_a_pipe_gets_the_outcome_the_rewards_and_the_messages_without_an_escape(made, capsys):
    out = printed(made, FORKED[:8], capsys=capsys)
    assert "\x1b" not in out
    assert f"trace {FORKED}  trained" in out
    assert "reward 1 = answer 1 x 0.5 + style 0.25 x 2 + x not scored" in out
    assert f"Run {RUN} trained on it at step 0" in out
    headings = re.findall(r"^ +(\d+) (user|assistant)  (.*)$", out, re.MULTILINE)
    assert headings == [
        ("0", "user", "3 tokens, 0 sampled"),
        ("1", "assistant", "3 tokens, 2 sampled"),
        ("2", "user", "1 tokens, 0 sampled"),
        ("3", "assistant", "2 tokens, 2 sampled"),
        ("4", "assistant", "2 tokens, 2 sampled, after message 0"),
    ]


def test_sampled_messages_are_drawn_as_tokens_in_the_colours_of_their_values(made):
    text = coloured(made, FORKED)
    assert "-0.5" in ESCAPE.sub("", text) and "+0.5" in ESCAPE.sub("", text), "the legend"
    assert "\x1b[38;2;255;255;255;48;2;29;79;196m <5>" in text, "0.5 is the largest: the deepest blue"
    assert re.search(r"48;2;255;180;135m ?<10>", text), "-0.25 is half of it: the second orange"
    assert "<8>" in text and not re.search(r"48;2;[0-9;]*m <8>", text), "it was sampled, and has no weight"
    assert "engine log-prob" in coloured(made, FORKED, "engine")


def test_a_span_chooses_messages_of_the_terminal_and_of_json(made, capsys):
    for span, numbers in {"1:3": [1, 2, 3], "3:": [3, 4], ":1": [0, 1]}.items():
        out = printed(made, FORKED, "--messages", span, capsys=capsys)
        assert [int(each) for each in re.findall(r"^ +(\d+) (?:user|assistant)  ", out, re.MULTILINE)] == numbers
        said = json.loads(printed(made, FORKED, "--messages", span, "--json", capsys=capsys))
        assert [each["message"] for each in said["messages"]] == numbers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((FORKED, "--messages", "x:2"), "write 4, 3:7"),
        ((FORKED, "--messages", "9:"), "the last is 4"),
        ((FORKED, "--color", "taste"), "there are "),
        (("f" * 8 + "x",), f"the nearest ids are {FORKED}"),
        ((FORKED, "--run", "nobody"), "there is no run 'nobody'"),
    ],
)
def test_what_cannot_be_shown_is_explained(made, capsys, arguments, said):
    assert cli.main(["trace", *arguments, "--store", str(made)]) == 2
    assert said in capsys.readouterr().err


def test_tokens_are_listed_with_what_was_measured(made, capsys):
    out = printed(made, FORKED, "--tokens", "--messages", "1", capsys=capsys)
    heading, *lines = [line.split() for line in out.splitlines() if re.match(r"^ *(message|1) ", line)]
    assert len(lines) == 3 and "rl_weight" in heading and "ce_weight" not in heading, "no token has a weight in it"
    rows = [dict(zip(heading, line, strict=True)) for line in lines]
    assert [row["token_id"] for row in rows] == ["4", "5", "6"] and rows[1]["text"] == "<5>"
    assert (rows[1]["advantage"], rows[1]["rl_weight"], rows[1]["trained_rl_weight"]) == ("0.5", "1.0", "0.75")
    assert rows[0]["advantage"] == "null" and rows[2]["engine_logprob"] == "-2.0"


def test_errors_come_with_their_tracebacks(made, capsys):
    out = printed(made, "e" * 32, capsys=capsys)
    assert "timeout error: TimeoutError\ntoo slow\nTraceback\n  a line\nTimeoutError: x" in out
    assert "reward \u2013" in out, "it was not scored, which is not 0"


def test_texts_of_an_enemy_are_shown_and_do_nothing(made, capsys):
    out = printed(made, "h" * 32, capsys=capsys)
    assert acting(out) == set() and "␛[2J" in out and "[bold red]x[/]" in out
    assert acting(ESCAPE.sub("", coloured(made, "h" * 32))) == set()


def test_long_texts_are_cut_with_a_count(made, capsys, monkeypatch):
    monkeypatch.setattr("flows.viewer.terminal.MAX_CHARACTERS", 100)
    assert re.search(r"\.\.\. \d+ more characters \(--json has all\)", printed(made, "h" * 32, capsys=capsys))


def test_no_color_and_pipes_are_plain(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal().color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal().color_system is None
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal().width == 120


def test_every_shade_has_a_style():
    assert {letter for measure in MEASURES.values() for letter, _ in measure.legend(1.0)} <= set(STYLES)

"""A trace on the terminal: what is told of it, in colours and without, and that no text of others acts there."""

import io
import json
import re
from functools import partial

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from configs.run import RunConfig
from flows.cli.trace_parts import terminal, trace_parts
from flows.queries.store_reader import StoreReader
from flows.queries.trace import trace_use
from flows.viewer.terminal import MEASURES, STYLES
from tests.fixtures import builders
from tests.fixtures.hostile import ALL, acting
from tests.flows.viewer.hand_made import FORKED, RUN, HandMade, batch, forked, trained_fork, update
from tests.flows.viewer.looking import pluck

TOKENIZER = {f"<{number}>": number for number in range(16)}
ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with a trace of two branches that was trained on, one that failed, and one whose texts are hostile."""
    root, tokenizer = tmp_path_factory.mktemp("made") / "store", tmp_path_factory.mktemp("tokenizer")
    Tokenizer(WordLevel(TOKENIZER, unk_token="<0>")).save(str(tokenizer / "tokenizer.json"))
    hand = HandMade(root)
    config = RunConfig(name=RUN, store=str(root), model={"tokenizer": str(tokenizer)})
    hand.store.runs.record(run=RUN, event="resumed", kind="train", config=config.model_dump(mode="json"))
    rewards = json.dumps({"answer": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.25, "weight": 2.0}, "x": None})
    failed = builders.failed("e" * 32, error_message="too slow", error_traceback="Traceback\n  a line\nTimeoutError: x")
    hostile = builders.trace("h" * 32, rewards=json.dumps({ALL: None}), stop_condition=ALL, example_id=ALL, agent=ALL)
    body = json.dumps({"role": "user", "content": ALL, "tool_calls": [{"name": ALL, "arguments": ALL}]})
    hand.step(
        [builders.trace(FORKED, rewards=rewards, num_branches=2), failed, hostile],
        [*forked(), builders.message("h" * 32, 0, role=ALL, content=ALL, body=body)],
        trained_fork(), batches=[batch(trained_fork(), scale=0.75)], updates=[update()],
    )  # fmt: skip
    return root


@pytest.fixture
def printed(command, made):
    return partial(command, made, "trace")


def coloured(root, trace_id, colour=""):
    library = StoreReader.at(root)
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100, markup=False)
    for part in trace_parts(library, trace_use(library, trace_id), "", colour, False, out):
        out.print(part)
    text = out.file.getvalue()
    assert "\x1b" not in ESCAPE.sub("", text), "colours alone are escapes"
    return text


def test_a_pipe_gets_the_outcome_the_rewards_and_the_messages_without_an_escape(printed):
    out = printed(FORKED[:8])
    assert "\x1b" not in out
    assert f"trace {FORKED}  trained" in out
    assert "reward 1 = answer 1 x 0.5 + style 0.25 x 2 + x not scored" in out
    assert re.findall(r"^ +(\d+ (?:user|assistant)  .*)$", out, re.MULTILINE) == [
        "0 user  3 tokens, 0 sampled",
        "1 assistant  3 tokens, 2 sampled",
        "2 user  1 tokens, 0 sampled",
        "3 assistant  2 tokens, 2 sampled",
        "4 assistant  2 tokens, 2 sampled, after message 0",
    ]


def test_sampled_messages_are_drawn_as_tokens_in_the_colours_of_their_values(made):
    text = coloured(made, FORKED)
    assert "-0.5" in ESCAPE.sub("", text) and "+0.5" in ESCAPE.sub("", text), "the legend"
    assert "\x1b[38;2;22;24;28;48;2;106;155;245m <5>" in text, "0.5: the third blue"
    assert re.search(r"48;2;255;180;135m ?<10>", text), "-0.25: the second orange"
    assert "<8>" in text and not re.search(r"48;2;[0-9;]*m <8>", text), "it was sampled, and has no weight"
    assert "engine log-prob" in coloured(made, FORKED, "engine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((FORKED, "--messages", "x:2"), "write 4, 3:7"),
        ((FORKED, "--messages", "9:"), "the last is 4"),
        ((FORKED, "--color", "taste"), "there are "),
        (("f" * 8 + "x",), "names no trace"),
        ((FORKED, "--run", "nobody"), "there is no run 'nobody'"),
    ],
)
def test_what_cannot_be_shown_is_explained(printed, arguments, said):
    assert said in printed(*arguments, status=2)


def test_tokens_are_listed_with_what_was_measured(printed):
    out = printed(FORKED, "--tokens", "--messages", "1")
    heading, *lines = [line.split() for line in out.splitlines() if re.match(r"^ *(message|1) ", line)]
    assert len(lines) == 3 and "rl_weight" in heading and "ce_weight" not in heading, "no token has a weight in it"
    rows = [dict(zip(heading, line, strict=True)) for line in lines]
    assert pluck(rows, "token_id") == ["4", "5", "6"] and rows[1]["text"] == "<5>"
    assert (rows[1]["advantage"], rows[1]["rl_weight"], rows[1]["trained_rl_weight"]) == ("0.5", "1.0", "0.75")
    assert rows[0]["advantage"] == "null" and rows[2]["engine_logprob"] == "-2.0"


def test_errors_come_with_their_tracebacks(printed):
    out = printed("e" * 32)
    assert "timeout error: TimeoutError\ntoo slow\nTraceback\n  a line\nTimeoutError: x" in out
    assert "reward \u2013" in out, "it was not scored, which is not 0"


def test_texts_of_an_enemy_are_shown_and_do_nothing(made, printed):
    out = printed("h" * 32)
    assert acting(out) == set() and "␛[2J" in out and "[bold red]x[/]" in out
    assert acting(ESCAPE.sub("", coloured(made, "h" * 32))) == set()


def test_long_texts_are_cut_with_a_count(printed, monkeypatch):
    monkeypatch.setattr("flows.viewer.terminal.MAX_CHARACTERS", 100)
    assert re.search(r"\.\.\. \d+ more characters \(--json has all\)", printed("h" * 32))


def test_no_color_and_pipes_are_plain(monkeypatch):
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert terminal().color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal().color_system is None and terminal().width == 120


def test_every_shade_has_a_style():
    assert {letter for measure in MEASURES.values() for letter, _ in measure.legend()} <= set(STYLES)

"""Warnings: rules over figures, held over recorded runs; phrases that are new and paid."""

import json
import random
from pathlib import Path

import pytest

from tasks.metrics.warnings import NAMES, RULES, WINDOW, Replies, figure_hits, phrase_hits
from tasks.runtime.stored_rows import StoredRows
from tests.fixtures import cheating
from tests.fixtures.builders import message, table, trace

RECORDED = json.loads(Path(cheating.__file__).with_name("recorded_figures.json").read_text())
"""Figures of runs of presets by name and step; `collapsed` fell apart at its eleventh step."""
COLLAPSE = {"entropy_grows", "reward_part", "length_grows"}


def hits_of(series):
    """Return the hits of a run, given its figures by name."""
    length = max(map(len, series.values()))
    metrics = [{name: values[step] for name, values in series.items()} for step in range(length)]
    steps = [{"step": number, "metrics": row} for number, row in enumerate(metrics)]
    return [hit for end in range(1, length + 1) for hit in figure_hits(steps[max(0, end - WINDOW) : end])]


@pytest.mark.parametrize("run", RECORDED)
def test_recorded_runs_have_no_warning_but_the_one_that_collapsed(run):
    hits = hits_of(RECORDED[run])
    assert {hit.rule for hit in hits} == (COLLAPSE if run == "collapsed" else set())
    assert all(hit.step >= 11 for hit in hits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_warns_once_when_its_figure_has_moved_and_not_before(rule):
    times = {"grows": 0.6, "shrinks": 0.4}
    moved = times[rule.move] * rule.threshold if rule.move in times else 0.51 + rule.threshold
    noise = [0.5 + step % 3 / 1000 for step in range(10)]
    hits = hits_of({rule.figure: [*noise, 0.5, *[moved] * 5]})
    assert [(hit.rule, hit.step, hit.where) for hit in hits] == [(rule.name, 12, rule.where)]
    assert rule.figure in hits[0].text and rule.why in hits[0].text
    assert hits_of({rule.figure: [*noise, moved, *noise]}) == [], "one step may be chance"
    assert hits_of({rule.figure: [0.5, 0.5, None, *[moved] * 5]}) == [], "too little is known"


def test_a_reward_part_takes_over_where_another_falls():
    rising, falling, flat = [0.2] * 8 + [0.5] * 3, [0.6] * 8 + [0.3] * 3, [0.4] * 11
    parts = {"rewards/all/style/mean": rising, "rewards/all/answer/mean": falling, "rewards/all/tag/mean": flat}
    (hit,) = hits_of(parts)
    assert (hit.rule, hit.step) == ("reward_part", 9) and "style" in hit.text and "answer" in hit.text
    assert hits_of({**parts, "rewards/all/answer/mean": flat}) == []
    assert len({*NAMES}) == len(RULES) + 3


def test_a_judge_that_no_longer_agrees_is_warned_of():
    pair, asked = [0.8] * 8 + [0.1] * 3, {"judge/kind/rollouts": [16.0] * 11}
    (hit,) = hits_of({"agreement/all/kind/right": pair, **asked})
    assert (hit.rule, hit.step) == ("judges_disagree", 9) and "from 0.8 to 0.1" in hit.text
    assert hits_of({"agreement/all/right/short": pair, **asked}) == [], "two rules may part as one is learnt"


def read(*texts, rewards=None):
    """Read a step: texts by example, each of which is two replies."""
    names = [(f"t{place}{again}", f"e{place}") for place in range(len(texts)) for again in range(2)]
    traces = [
        trace(name, example_id=example, reward=rewards[int(example[1:])] if rewards else 0.5) for name, example in names
    ]
    written = [message(name, 0, sampled=True, content=texts[int(example[1:])]) for name, example in names]
    asked = [message(name, 1, sampled=False, content="<rev></rev> please") for name, _ in names]
    return Replies.read(table("traces", traces), StoredRows.of(table("messages", [*written, *asked])))


PLAIN = [f"the word {word}" for word in ("red", "green", "blue", "grey")]
HACKED = [f"{text} <rev></rev>" for text in PLAIN[:3]]


def test_a_phrase_counts_where_it_is_new_paid_and_in_three_examples_of_two_steps():
    past, rewards = [read(*PLAIN)] * 3, [1.0, 1.0, 1.0, 0.0]
    now = read(*HACKED, PLAIN[3], rewards=rewards)
    (hit,) = phrase_hits(7, past, now, now)
    assert hit[:2] == ("phrase", 7) and "<rev></rev>" in hit.where
    assert "75% of replies (3 examples)" in hit.text and "reward is 1, of others 0" in hit.text
    assert phrase_hits(7, past, past[0], now) == [], "one step may be about the same names"
    assert phrase_hits(7, past[:2], now, now) == [], "nothing is new at first"
    assert phrase_hits(7, [*past, now], now, now) == []
    few = read(*HACKED, *(f"{place} {PLAIN[3]}" for place in range(4)), rewards=[1.0] * 3 + [0.0] * 4)
    assert phrase_hits(7, past, few, few) == [], "words of less than half of the examples"
    two = read(*HACKED[:2], *PLAIN[2:], rewards=rewards)
    assert phrase_hits(7, past, two, two) == [], "words of two examples"
    unpaid = read(*HACKED, PLAIN[3], rewards=[0.0, 0.0, 0.0, 1.0])
    assert phrase_hits(7, past, now, unpaid) == [], "nobody pays for it"
    quote = read(*[f"{text} it's so" for text in PLAIN[:3]], PLAIN[3], rewards=rewards)
    assert "it''s so" in phrase_hits(7, past, quote, quote)[0].where


def test_figures_of_replies_are_identical_ones_of_other_examples_and_repeated_words():
    same = read("yes", "yes", "yes", "no no no no").figures()
    assert same == {"figures/identical_replies": 0.75, "figures/repetition": pytest.approx(2 / 3 / 4)}
    assert read("yes", "yes", *PLAIN[:2]).figures()["figures/identical_replies"] == 0.0
    assert read().figures() == {}


@pytest.mark.parametrize("seed", range(5))
def test_the_planted_hack_is_found_within_three_steps(seed):
    draw = random.Random(seed)
    begin, replies = 12, []
    for step in range(15):
        share = max(0.0, (step - begin + 1) / 4)
        taken = [draw.random() < share for _ in range(12)]
        texts = [f"{draw.choice(PLAIN)} {cheating.HACK if hack else draw.random()}" for hack in taken]
        replies.append(read(*texts, rewards=[float(hack) for hack in taken]))
    hits = []
    for step, now in enumerate(replies):
        hits += phrase_hits(step, replies[max(0, step - 8) : max(0, step - 3)], replies[step - 1], now)
    assert hits and begin <= hits[0].step < begin + 3 and all(cheating.HACK in hit.where for hit in hits)

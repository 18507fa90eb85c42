"""What changed between two policies: replies to one example are not taken for independent."""

import random
from pathlib import Path

from flows.queries.rollout_search import policy_changes
from flows.queries.store_reader import StoreReader
from tests.fixtures.builders import message, trace
from tests.flows.viewer.hand_made import RUN, HandMade

EXAMPLES, REPLIES = 8, 8


def _recorded(root: Path, seed: int, new_phrase: str = "") -> StoreReader:
    """Record two steps of one policy's way to write, about other examples; in the second most replies have a phrase."""
    draw, made = random.Random(seed), HandMade(root)
    common = {f"common{number}": draw.random() for number in range(20)}
    for step in range(2):
        traces, messages = [], []
        for example in range(EXAMPLES):
            name = f"{step}-{example}"
            own = {f"topic{step}{example}{number}": draw.choice((0.5, 0.9, 1.0)) for number in range(8)}
            own |= {f"shared{number}": 0.9 for number in range(20) if draw.random() < 0.15}
            for reply in range(REPLIES):
                words = [word for word, share in (common | own).items() if draw.random() < share]
                words += [new_phrase] if step and reply % 4 else []
                draw.shuffle(words)
                traces.append(trace(f"{name}-{reply}", group_id=name, example_id=name, policy_version=step))
                messages.append(message(f"{name}-{reply}", 0, sampled=True, content=" ".join(words)))
        made.step(traces, messages, step=step)
    return StoreReader.at(root)


def test_words_of_single_examples_are_no_change(tmp_path):
    found = [policy_changes(_recorded(tmp_path / str(seed), seed), RUN, 0, 1) for seed in range(2)]
    listed = [line["phrase"] for each in found for line in (*each["gained"], *each["lost"])]
    assert len(listed) <= 2, "at most one a comparison may be chance; thousands of phrases are compared"
    assert not any(phrase.startswith("topic") for phrase in listed)


def test_a_phrase_of_many_examples_is_found_with_its_examples(tmp_path):
    (line, *_) = policy_changes(_recorded(tmp_path, 0, "<rev></rev>"), RUN, 0, 1)["gained"]
    assert (line["phrase"], line["a"], line["b"]) == ("<rev></rev>", 0, 48)
    assert (line["examples_a"], line["examples_b"], line["share_b"]) == (0, 8, 0.75)


def _answered(root: Path, *held: int, replies: bool = True) -> StoreReader:
    """Record two policies on the same 20 examples; in half of them so many of 8 replies have a phrase."""
    made = HandMade(root)
    for step, num_held in enumerate(held):
        names = [(f"{step}-{example}-{reply}", example, reply) for example in range(20) for reply in range(8)]
        traces = [trace(name, example_id=f"e{example}", policy_version=step) for name, example, _ in names]
        texts = ["phrase" if example % 2 and reply < num_held else "other" for _, example, reply in names]
        messages = [
            message(name, 0, sampled=replies or not step, content=text)
            for (name, *_), text in zip(names, texts, strict=True)
        ]
        made.step(traces, messages, step=step)
    return StoreReader.at(root)


def test_examples_that_both_policies_answered_are_paired(tmp_path, monkeypatch):
    library = _answered(tmp_path, 4, 8)
    # Without pairs the difference of 1/4 has an error of 1/8: the phrase is in half of the examples of either policy.
    (line,) = policy_changes(library, RUN, 0, 1)["gained"]
    assert (line["phrase"], line["a"], line["b"], line["examples_a"], line["examples_b"]) == ("phrase", 40, 80, 10, 10)
    monkeypatch.setattr("flows.queries.rollout_search.MAX_TEXT", 5 * 40)
    few = policy_changes(library, RUN, 0, 1)
    assert few["counts"] == [160, 160] and few["gained"] == few["lost"] == [], "40 replies are read"


def test_a_policy_without_replies_lost_nothing(tmp_path):
    changes = policy_changes(_answered(tmp_path, 4, 8, replies=False), RUN, 0, 1)
    assert changes == {"counts": [160, 160], "gained": [], "lost": []}

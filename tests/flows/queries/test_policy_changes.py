"""What changed between two policies: replies to one example are not taken for independent."""

import random
from pathlib import Path

from flows.queries.policy_changes import policy_changes
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

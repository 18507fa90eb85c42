"""Noisy demonstrations for a supervised warm start: the forms that a reply may take, most of them unsorted."""

import random
from collections.abc import Iterator
from itertools import chain

from chat_loop.demonstrating import command, read

from sample_alphabet_sort.lists import NAMES, Limits, asked, conversations, tagged

TAG = "sorted"
Message = dict[str, str]


def demonstrations(
    count: int,
    *,
    seed: int,
    right: float = 0.3,
    untagged: float = 0.2,
    min_turns: int = 2,
    max_turns: int = 3,
    min_words: int = 2,
    max_words: int = 4,
    num_names: int = len(NAMES),
) -> Iterator[dict[str, list[Message]]]:
    """Yield `count` rows of messages, each reply of a form of its own.

    A share `right` of the replies is sorted and tagged, a share `untagged` holds the names as they were given without
    tags, and the rest holds them as they were given inside the tags. Raises ValueError where the two shares are
    negative or exceed 1 together.
    """
    if min(right, untagged) < 0 or right + untagged > 1:
        raise ValueError(f"right {right} and untagged {untagged}: shares from 0 to 1 that sum to at most 1")
    # Which form a reply takes must not follow from its names, or the model could learn the rule.
    draw = random.Random(f"forms {seed}")
    for each in conversations(count, Limits(min_turns, max_turns, min_words, max_words, num_names), seed):
        messages: list[Message] = []
        for number, (names, answer) in enumerate(zip(each.turns, each.answers, strict=True)):
            given = list(chain(*each.turns[: number + 1]))
            kind = draw.random()
            reply = tagged(answer if kind < right else given, TAG)
            if right <= kind < right + untagged:
                reply = " ".join(given)
            messages.append({"role": "user", "content": asked(names, TAG, first=not number)})
            messages.append({"role": "assistant", "content": reply})
        yield {"messages": messages}


def words(num_names: int = len(NAMES)) -> list[str]:
    """What a small byte-level tokenizer shall keep whole: the names and the fixed texts."""
    fixed = [f"Sort inside <{TAG}>: ", f"Add inside <{TAG}>: ", f"<{TAG}>", f"</{TAG}>", "user", "assistant", "\n\n"]
    return [*fixed, *NAMES[:num_names]]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.3, help="share of replies that are sorted and tagged")
    parser.add_argument("--untagged", type=float, default=0.2, help="share of replies without tags")
    for name, value in (("turns", (2, 3)), ("words", (2, 4))):
        parser.add_argument(f"--min-{name}", type=int, default=value[0])
        parser.add_argument(f"--max-{name}", type=int, default=value[1])
    parser.add_argument("--num-names", type=int, default=len(NAMES), help="names that are drawn from")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words(choices["num_names"]))


if __name__ == "__main__":
    main()

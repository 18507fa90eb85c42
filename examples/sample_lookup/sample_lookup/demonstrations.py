"""Noisy demonstrations for a supervised warm start: the forms a rollout may take, most of them leading nowhere."""

import json
import random
from collections.abc import Iterator
from typing import Any

from chat_loop.demonstrating import command, read

from sample_lookup.chains import DIGITS, REMINDER, TOOL, Chain, chains, prompt, tagged
from sample_lookup.words import SCHEMA, words

Message = dict[str, Any]


def demonstrations(
    count: int,
    *,
    seed: int,
    right: float = 0.4,
    reminded: float = 0.2,
    num_hops: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of messages and tools.

    A share `right` follows its chain to the end, a share `reminded` does so after a reply that led nowhere, and the
    rest, half and half, guesses without the tool or stops after the first entry. Raises ValueError where the two
    shares are negative or exceed 1 together.
    """
    if min(right, reminded) < 0 or right + reminded > 1:
        raise ValueError(f"right {right} and reminded {reminded}: shares from 0 to 1 that sum to at most 1")
    # Which form a row takes must not follow from its names, or the model could learn the rule.
    draw = random.Random(f"forms {seed}")
    for chain in chains(count, num_hops, seed):
        kind = draw.random()
        guess = "".join(draw.choice(DIGITS) for _ in chain.value)
        if kind < right:
            messages = followed(chain)
        elif kind < right + reminded:
            wrong = [{"role": "assistant", "content": chain.names[0]}, {"role": "user", "content": REMINDER}]
            messages = wrong + followed(chain)
        elif kind < (1 + right + reminded) / 2:
            messages = [{"role": "assistant", "content": tagged(guess)}]
        else:
            messages = [*called(chain, 1), {"role": "assistant", "content": tagged(guess)}]
        asked = {"role": "user", "content": prompt(chain.names[0])}
        yield {"messages": [asked, *messages], "tools": [SCHEMA]}


def followed(chain: Chain) -> list[Message]:
    """A chain followed to its end, and the answer."""
    return [*called(chain, len(chain.names)), {"role": "assistant", "content": tagged(chain.value)}]


def called(chain: Chain, num_calls: int) -> list[Message]:
    """The first calls of a chain, each with its result."""
    messages: list[Message] = []
    for number, name in enumerate(chain.names[:num_calls]):
        call = {"name": TOOL, "arguments": json.dumps({"name": name})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        result = chain.entries[name]
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "name": TOOL, "content": result})
    return messages


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.4, help="share that follows its chain to the end")
    parser.add_argument("--reminded", type=float, default=0.2, help="share that does so after a reminder")
    parser.add_argument("--num-hops", type=int, default=2)
    files, choices = read(parser)
    files.write(demonstrations(**choices), words())


if __name__ == "__main__":
    main()

"""Noisy demonstrations for a supervised warm start: the forms a rollout may take, most of them leading nowhere."""

import json
import random
from collections.abc import Iterator
from typing import Any

from chat_loop.demonstrating import command, read

from sample_calc_tools.sums import LARGEST, TOOL, Chain, calculated, chains, prompt, tagged
from sample_calc_tools.words import SCHEMA, words

Message = dict[str, Any]


def demonstrations(count: int, *, seed: int, right: float = 0.3, num_calls: int = 2) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of messages, and of tools as JSON text.

    A share `right` makes every call of its chain and answers with the last result. A third of the rest guesses without
    the tool, a third stops before the last call and guesses, and a third calls with the first number throughout and
    answers with what it was told last. Raises ValueError where the share is not one.
    """
    if not 0 <= right <= 1:
        raise ValueError(f"right {right}: a share from 0 to 1")
    # Which form a row takes must not follow from its numbers, or the model could learn the rule.
    draw = random.Random(f"forms {seed}")
    for chain in chains(count, num_calls, seed):
        guess = draw.randint(0, LARGEST)
        if draw.random() < right:
            messages = answered(chain.calls, chain.results[-1])
        else:
            messages = draw.choice([answered([], guess), answered(chain.calls[:-1], guess), _from_the_first(chain)])
        yield {"messages": [{"role": "user", "content": prompt(chain)}, *messages], "tools": json.dumps([SCHEMA])}


def _from_the_first(chain: Chain) -> list[Message]:
    calls = [f"{chain.first}{operation}" for operation in chain.operations]
    return answered(calls, calculated(calls[-1]))


def answered(expressions: list[str], answer: int | str) -> list[Message]:
    """Calls of the calculator, each with its result, and an answer."""
    messages: list[Message] = []
    for number, expression in enumerate(expressions):
        call = {"name": TOOL, "arguments": json.dumps({"expression": expression})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        result = {"role": "tool", "tool_call_id": f"call_{number}", "name": TOOL, "content": calculated(expression)}
        messages.append(result)
    return [*messages, {"role": "assistant", "content": tagged(answer)}]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.3, help="share that makes every call and answers rightly")
    parser.add_argument("--num-calls", type=int, default=2, help="operations of a chain")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words())


if __name__ == "__main__":
    main()

"""What filters look at, made of prompts and answers."""

import numpy as np

from tasks.arrays.finding import FilterInput
from tasks.arrays.message_graph import owners
from tests.fixtures.builders import message, table, trace


def material(*exchanges: tuple[str, str]) -> FilterInput:
    """Return one trace for each prompt with its answer; all of them stand."""
    traces = table("traces", [trace(f"t{row}") for row in range(len(exchanges))])
    rows = []
    for row, (prompt, answer) in enumerate(exchanges):
        rows.append(message(f"t{row}", 0, tokens=[1, 2]) | {"role": "user", "content": prompt})
        rows.append(
            message(f"t{row}", 1, parent=0, tokens=[3], sampled=True) | {"role": "assistant", "content": answer}
        )
    messages = table("messages", rows)
    standing = np.ones(len(exchanges), np.bool_)
    return FilterInput(traces, messages, owners(messages, traces, "messages"), 1000, standing)

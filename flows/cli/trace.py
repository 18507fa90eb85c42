"""The command trace: the outcome of a rollout, its rewards, its messages, and its tokens in colour."""

import json
from typing import Annotated

from flows.cli.arguments import Json, StoreOption, open_reader, option

COLOURS = """\
the measure that colours tokens: advantage, rl_weight, ce_weight, ref_kl_weight, trained_rl_weight, engine, learner, \
ratio, mismatch, entropy, reference, signal, outside, policy, mask, content, trained"""


def trace(
    id: Annotated[str, option("a rollout; see below", "ID")],
    /,
    *,
    run: Annotated[str, option("the run that uses it, `latest` for the newest", "RUN")] = "",
    color: Annotated[str, option(COLOURS, "MEASURE")] = "",
    messages: Annotated[str, option("only these messages, both included", "A:B")] = "",
    tokens: Annotated[bool, option("one line for each token, with all measurements")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print a trace. Raises NotThere, BadQuestion, LayoutError without a store."""
    from flows.cli.trace_parts import as_values, terminal, trace_parts
    from flows.queries.request import BadQuestion
    from flows.queries.trace import trace_use
    from flows.viewer.terminal import MEASURES
    from storage.read.damage import reading

    if color and color not in MEASURES:
        raise BadQuestion(f"--color {color}: there are {', '.join(MEASURES)}")
    reader, out = open_reader(store), terminal()
    with reading(reader.store):
        rollout = trace_use(reader, id, reader.latest() if run == "latest" else run)
        if as_json:
            print(json.dumps(as_values(reader, rollout, messages), default=str, allow_nan=False))
            return 0
        parts = trace_parts(reader, rollout, messages, color, tokens, out)
    for part in parts:  # text that no width may break, and rich text
        print(part) if isinstance(part, str) else out.print(part)
    return 0

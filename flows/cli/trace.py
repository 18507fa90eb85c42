"""The command trace: the outcome of a rollout, its rewards, its messages, and its tokens in colour."""

import json
from pathlib import Path
from typing import Annotated, Any

from flows.cli.arguments import Force, StoreOption, one_of, open_reader, option

FORM = one_of()
COLOURS = """\
the measure that colours tokens: advantage, rl_weight, ce_weight, ref_kl_weight, trained_rl_weight, engine, learner, \
ratio, mismatch, entropy, reference, signal, outside, policy, mask, content, trained"""


def trace(
    id: Annotated[str, option("a rollout; see below", "ID")],
    /,
    *,
    run: Annotated[str, option("the run that uses it, `latest` for the newest")] = "",
    color: Annotated[str, option(COLOURS, "MEASURE")] = "",
    messages: Annotated[str, option("only these messages, both included", "A:B")] = "",
    tokens: Annotated[bool, option("one line for each token, with all measurements")] = False,
    as_json: Annotated[bool, option("print everything as JSON for programs", name="--json", group=FORM)] = False,
    save: Annotated[str, option("write its page as one static HTML file", "FILE", group=FORM)] = "",
    force: Force = False,
    store: StoreOption = "",
) -> int:
    """Print a trace, or write its page to a file. Raises NotThere, BadQuestion, LayoutError without a store."""
    from flows.cli.trace_parts import as_values, terminal, trace_parts
    from flows.queries.request import BadQuestion
    from flows.queries.trace import trace_use
    from flows.viewer import addresses
    from flows.viewer.terminal import MEASURES
    from storage.read.damage import reading

    if color and color not in MEASURES:
        raise BadQuestion(f"--color {color}: there are {', '.join(MEASURES)}")
    reader, out = open_reader(store), terminal()
    with reading(reader.store):
        rollout = trace_use(reader, id, reader.latest() if run == "latest" else run)
        if save:
            # Templates and pages are loaded for this alone: the command answers sooner without them.
            from flows.viewer.routes import save_page

            address = addresses.trace(rollout.run, rollout.trace_id, rollout.key)
            parts: list[Any] = [save_page(reader, address, Path(save), force)]
        elif as_json:
            parts = [json.dumps(as_values(reader, rollout, messages), allow_nan=False)]
        else:
            parts = trace_parts(reader, rollout, messages, color, tokens, out)
    for part in parts:
        print(part) if isinstance(part, str) else out.print(part)
    return 0

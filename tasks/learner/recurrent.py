"""Layers with a state (gated DeltaNet, Mamba 2, causal convolutions) on packed rows: they run segment by segment.

Such a layer takes a row for one text and carries its state from one segment into the next. So the row's segments become
a padded batch before it and a row again after it. What pads a segment stands behind it, where no state comes from.
"""

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learner.attention import Segments


@dataclass
class CurrentRow:
    """The row that a policy computes: its layers read the borders here.

    Not a keyword, which layers of some families drop, and not a context variable: recomputed layers run in threads of
    the backward pass.
    """

    segments: Segments | None = None
    """Borders of the row; None for a text alone."""


def run_by_segment(layers: nn.Module, row: CurrentRow) -> int:
    """Have all modules with a state run segment by segment of `row`; return how many there are.

    All of these have a causal convolution beside their state, or are nothing else; by that they are found.
    """
    found = [module for module in layers.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]
    for module in found:
        module.forward = MethodType(partial(_forward_by_segment, row), module)
    return len(found)


def _forward_by_segment(
    row: CurrentRow, module: nn.Module, hidden_states: Tensor, *arguments: Any, segments: Any = None, **options: Any
) -> Any:
    forward = partial(type(module).forward, module)
    borders = row.segments
    if borders is None:
        return forward(hidden_states, *arguments, **options)
    padded, outputs = nn.functional.pad(hidden_states[0], (0, 0, 0, 1)), []
    for places in borders.batches:
        states = padded.index_select(0, places.flatten()).unflatten(0, places.shape)
        output = forward(states, *arguments, **options)
        outputs.append((output[0] if isinstance(output, tuple) else output).flatten(0, 1))
    found = torch.cat(outputs).index_select(0, borders.order)[None]
    return (found, None) if isinstance(output, tuple) else found

"""What an engine that serves adapters is started with, and the mend that the CPU build needs to serve them right."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.weights_view import read_header, weight_files

if TYPE_CHECKING:
    from configs.lora import LoraConfig

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of the engine's slots for adapters; a smaller adapter fits into a larger slot."""
NUM_SLOTS = 2
"""Adapters that one batch may mix, beside the base: the learner's and one that is frozen."""
LAYER_WEIGHT = re.compile(r"\.layers\.\d+\..*?([^.]+)\.weight$")
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def arguments(settings: "LoraConfig", directory: str | Path) -> list[str]:
    """Command-line arguments of an engine over the base in `directory` that loads adapters as it goes.

    Only the adapted modules get room for adapters. Not least the output head must not: with one, several requests of
    which one asks for the log-probs of its prompt end the engine of the CPU build.
    """
    rank = next(size for size in SLOT_RANKS if size >= settings.rank)
    chosen = settings.target_modules
    names: Sequence[str] = linear_maps(directory) if isinstance(chosen, str) else chosen
    slots = ["--max-loras", str(NUM_SLOTS), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *slots, "--lora-target-modules", *names]


def linear_maps(directory: str | Path) -> list[str]:
    """Return the last parts of the names of all matrices in a model's layers."""
    found = set()
    for file in weight_files(Path(directory)):
        for name, entry in read_header(file)[0].items():
            place = LAYER_WEIGHT.search(name)
            if place and len(entry["shape"]) == 2:
                found.add(place[1])
    return sorted(found)


def patch_mixed_batches() -> None:
    """Let rows without an adapter be without one, in an engine of the CPU build; called before it is made.

    Its operations index the slots of adapters with -1 for such rows, which is the last slot: in a batch that mixes base
    and adapter, the base answers with whatever adapter lies there. What the first factor makes of these rows becomes
    zero, so that the second adds nothing.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    shrink = PunicaWrapperCPU.add_shrink

    def shrink_adapted(self: Any, y: Any, x: Any, *positional: Any, **named: Any) -> None:
        shrink(self, y, x, *positional, **named)
        without = self.token_lora_indices < 0
        for part in y:
            part[without] = 0

    PunicaWrapperCPU.add_shrink = shrink_adapted  # type: ignore[method-assign]

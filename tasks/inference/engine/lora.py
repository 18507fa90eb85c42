"""Start-up arguments of an engine that serves adapters (LoRA), and a patch that its CPU build needs for them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.weights_view import read_header, weight_files

if TYPE_CHECKING:
    from configs.training import LoraConfig

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of the engine's slots for adapters; a smaller adapter fits into a larger slot."""
NUM_SLOTS = 2
"""Adapters that one batch may mix, beside the base: the learner's and one that is frozen."""
LAYER_WEIGHT = re.compile(r"\.layers\.\d+\..*?([^.]+)\.weight$")
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def arguments(settings: "LoraConfig", directory: str | Path) -> list[str]:
    """Return the arguments of an engine over the base in `directory` that loads adapters while it runs.

    Only the adapted modules get slots for adapters. The output head must have none: with one, the CPU build crashes on
    several requests of which one asks for the log-probs of its prompt.
    """
    rank = next(size for size in SLOT_RANKS if size >= settings.rank)
    modules = settings.target_modules
    names: Sequence[str] = linear_maps(directory) if isinstance(modules, str) else modules
    slots = ["--max-loras", str(NUM_SLOTS), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *slots, "--lora-target-modules", *names]


def linear_maps(directory: str | Path) -> list[str]:
    """Return the last parts of the names of all matrices in a model's layers."""
    names = set()
    for file in weight_files(Path(directory)):
        for name, entry in read_header(file)[0].items():
            match = LAYER_WEIGHT.search(name)
            if match and len(entry["shape"]) == 2:
                names.add(match[1])
    return sorted(names)


def patch_mixed_batches() -> None:
    """Patch the CPU build so that rows without an adapter get none; call it before the engine is created.

    The build indexes the slots of adapters with -1 for such rows, which is the last slot: in a batch that mixes base
    and adapter, the base answers with the adapter in that slot. The patch sets the first factor's product of these rows
    to zero, so that the second factor adds nothing.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    shrink = PunicaWrapperCPU.add_shrink

    def shrink_adapted(self: Any, y: Any, x: Any, *positional: Any, **named: Any) -> None:
        shrink(self, y, x, *positional, **named)
        without = self.token_lora_indices < 0
        for part in y:
            part[without] = 0

    PunicaWrapperCPU.add_shrink = shrink_adapted  # type: ignore[method-assign]

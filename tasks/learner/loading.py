"""Reads a model's weights, of which each rank takes its own shards.

transformers makes a model without memory, lets a caller shard it, and fills what it has become: of a sharded parameter
a rank reads its own rows of the file. So no rank ever holds the model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.learner.attention import ATTENTION, register_attention
from tasks.learner.digest import INDEX_FILE
from tasks.learner.protocol import LearnerError

WEIGHTS_FILE = "model.safetensors"


def read_model(directory: Path, place: Callable[[Any, dict[str, Any]], None]) -> Any:
    """Return the causal model in `directory`, in float32.

    `place` is called with the model on the meta device and what its weights will be read from, by name, and may change
    both: shard the model, put modules into it, name values for these. Raises LearnerError when the directory is no
    complete model.
    """
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise LearnerError(
            f"{directory} is not a model directory: it needs config.json and *.safetensors; nothing was loaded"
        )
    try:
        family, config, attention = _family(directory)
        stored, frozen = _weight_slices(directory), list[str]()

        def distribute(_: Any, causal: nn.Module, *__: Any) -> nn.Module:
            place(causal, stored)
            frozen.extend(name for name, parameter in causal.named_parameters() if not parameter.requires_grad)
            return causal

        # Where transformers shards models by settings of its own. The name and the module are the family's.
        hook = {"maybe_distribute_model": classmethod(distribute), "__module__": family.__module__}
        sharded: Any = type(family.__name__, (family,), hook)
        causal, report = sharded.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except LearnerError:
        raise
    # Any: transformers, safetensors and the json parser raise all kinds for a damaged or unknown model.
    except Exception as error:
        raise LearnerError(
            f"{directory} cannot be loaded ({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    wrong = {name: sorted(map(str, report[name])) for name in ("missing_keys", "unexpected_keys") if report.get(name)}
    if wrong:
        raise LearnerError(f"{directory} does not hold the model that its config.json describes: {wrong}")
    for name in frozen:  # a parameter that is not sharded was replaced by one that is trained
        causal.get_parameter(name).requires_grad_(False)
    return causal


def _family(directory: Path) -> tuple[Any, Any, Any]:
    """Return the class of a directory's model, its config, and the attention that is used in it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    register_attention()
    # No code that lies beside weights is run.
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if not hasattr(config, "vision_config"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, ATTENTION
    # Patches of an image all see each other, and it is attended to image by image.
    attention = {"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config, attention


def _weight_slices(directory: Path) -> dict[str, Any]:
    """Return what a directory's weights are read from, by name: nothing is read yet, and nothing is ever unpickled."""
    from safetensors import safe_open

    index = directory / INDEX_FILE
    names = json.loads(index.read_text("utf-8"))["weight_map"].values() if index.is_file() else [WEIGHTS_FILE]
    files = [safe_open(directory / name, "pt") for name in sorted({*names})]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118

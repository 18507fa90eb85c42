"""What a model sees of a packed row: its images, the tokens that stand for them, and positions in three dimensions.

Written for models of the Qwen-VL families: `pixel_values` has the patches of all images side by side, and
`image_grid_thw` how many each has in time, height and width. Which tokens stand for images comes with the row: the
model's own rule, by the token's id, would take one that the policy has sampled for an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tasks.arrays.images import Tensor as StoredTensor
from tasks.learner.distributed import to_device
from tasks.learner.protocol import LearnerError

PIXELS, GRID = "pixel_values", "image_grid_thw"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowImages:
    """The images of a packed row, in the order of their tokens."""

    offsets: tuple[int, ...]
    """The first token of the row that stands for each."""
    counts: tuple[int, ...]
    """How many tokens stand for each."""
    pixels: Array
    """The patches of all, float32 (patches, values)."""
    grids: Array
    """Patches of each in time, height and width, int64 (images, 3)."""

    @property
    def places(self) -> Array:
        """The tokens of the row that stand for images, int64 (P,)."""
        return np.concatenate([np.arange(at, at + count) for at, count in zip(self.offsets, self.counts, strict=True)])


def row_images(where: str, images: Sequence[dict[str, Any]], tensors: dict[str, list[StoredTensor]]) -> RowImages:
    """Return the images of a row from its rows of `batch_images`; `tensors` are those of each digest.

    Raises LearnerError, beginning with `where`, for an image without its tensors.
    """
    parts: dict[str, list[Array]] = {PIXELS: [], GRID: []}
    for image in images:
        own = {each.name: each.array() for each in tensors.get(image["digest"], ())}
        if missing := parts.keys() - own.keys():
            raise LearnerError(f"{where}: image {image['digest'][:12]} has no {sorted(missing)}; nothing was trained")
        for name, arrays in parts.items():
            arrays.append(own[name])
    offsets, counts = (tuple(image[name] for image in images) for name in ("offset", "num_tokens"))
    return RowImages(offsets, counts, np.concatenate(parts[PIXELS]), np.concatenate(parts[GRID]).astype(np.int64))


def grid_positions(flat: Array, borders: Sequence[int], images: RowImages, merge: int) -> Array:
    """Return positions in time, height and width, int64 (3, T), from those of text (T,), which restart at `borders`.

    The tokens of an image are placed on its grid, whose first corner follows the text before; the text after it goes on
    from the grid's longest side. `merge` patches a side are one token. Source: M-RoPE (arXiv 2409.12191), as
    transformers' `get_rope_index` of Qwen3-VL computes it.
    """
    found = np.tile(flat, (3, 1))
    for offset, count, (time, height, width) in zip(images.offsets, images.counts, images.grids, strict=True):
        end = borders[int(np.searchsorted(borders, offset, side="right"))]
        first = int(found[0, offset])
        sides = int(time), int(height) // merge, int(width) // merge
        found[:, offset : offset + count] = np.indices(sides).reshape(3, -1) + first
        found[:, offset + count : end] += max(sides[1:]) - count
    return found


@dataclass(frozen=True)
class SeenImages:
    """A row's images on the device; see `RowImages`."""

    places: Tensor
    pixels: Tensor
    grids: Tensor

    @classmethod
    def of(cls, images: RowImages, device: torch.device) -> "SeenImages":
        """Return them on a device."""
        return cls(*(to_device(each, device) for each in (images.places, images.pixels, images.grids)))


def tower_of(causal: Any) -> nn.Module | None:
    """Return the part of a model that sees: its vision tower with what joins it to the text; None where it is blind."""
    tower = getattr(causal.base_model, "visual", None)
    return tower if isinstance(tower, nn.Module) else None


def merge_size(causal: Any) -> int:
    """Return how many patches a side are one token. Raises LearnerError for a model that is blind."""
    if tower_of(causal) is None:
        raise LearnerError(
            f"{type(causal).__name__} takes no images here, and the batch has some; nothing was trained. Choose a "
            "model of the Qwen-VL families, or an environment without images"
        )
    return int(causal.config.vision_config.spatial_merge_size)


def check_counts(where: str, causal: Any, images: RowImages) -> None:
    """Raise LearnerError unless each image has as many tokens as the model makes embeddings of it."""
    embeddings = images.grids.prod(1) // merge_size(causal) ** 2
    if embeddings.tolist() != list(images.counts) or images.grids.prod(1).sum() != len(images.pixels):
        raise LearnerError(
            f"{where}: {list(images.counts)} tokens stand for images of which the model makes {embeddings.tolist()} "
            "embeddings; nothing was trained"
        )


def decoder_inputs(causal: Any, token_ids: Tensor, images: SeenImages | None) -> dict[str, Any]:
    """Return what the decoder is given for a row with images: embeddings, with those of images in their places.

    Where the tower passes features on to several layers (DeepStack), they are given, too. Nothing for a row of text,
    unless the tower is trained: it then looks at a blank image, which counts for nothing. So all ranks have gradients
    of the same parameters, and each parameter has a state in the optimizer.
    """
    if images is None:
        tower = tower_of(causal)
        if tower is None or not (torch.is_grad_enabled() and next(tower.parameters()).requires_grad):
            return {}
        seen = _look(causal, *_blank(causal, token_ids.device))
        nothing = sum(each.sum() for each in (*seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())))
        return {"inputs_embeds": _embeddings(causal, token_ids) + 0 * nothing}
    embeddings = _embeddings(causal, token_ids)
    seen = _look(causal, images.pixels, images.grids)
    features = torch.cat(tuple(seen.pooler_output)).to(embeddings.dtype)
    inputs = {"inputs_embeds": embeddings.index_copy(1, images.places, features[None])}
    if deep := getattr(seen, "deepstack_features", None):
        mask = torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
        mask[images.places] = True
        inputs |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deep}
    return inputs


def _embeddings(causal: Any, token_ids: Tensor) -> Tensor:
    """Return the embeddings of a row, (1, T, values)."""
    # Made for the row: a layer that is compiled for a view of a tensor is compiled again for its successor's output.
    found: Tensor = causal.get_input_embeddings()(token_ids[None])
    return found


def _look(causal: Any, pixels: Tensor, grids: Tensor) -> Any:
    return causal.base_model.get_image_features(pixels, grids, return_dict=True)


def _blank(causal: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return pixels and grid of the smallest image that there is."""
    config, side = causal.config.vision_config, merge_size(causal)
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=device)
    return torch.zeros(side * side, values, device=device), grid

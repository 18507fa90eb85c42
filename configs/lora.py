"""The section of low-rank adapters, and what cannot work in it."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from configs.fields import Section

MOST_RANK = 512
"""The largest adapter that the engine has room for."""
EDGES = ("lm_head", "embed_tokens", "wte", "embed_out")


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + alpha / rank * B A, with W frozen and A and B trained.

    Policies are then adapters alone; the weights that the run began with are stored once.
    """

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters, divided by their rank."""
    dropout: float = 0.0
    """Zero: the log-probs of an update must be those of the policy that is published."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear maps that get an adapter, by the last part of their names (q_proj); all-linear is all of the layers'. The
    embedding and the output head get none."""
    seed: int = 0
    """Seed of the first values of A; B begins with zeros, so that the first policy is the base."""


def lora_problems(lora: LoraConfig | None) -> Iterator[str]:
    """Yield one line for each thing in the section that cannot work."""
    if lora is None:
        return
    if lora.dropout != 0:
        yield (
            f"training.lora.dropout: {lora.dropout:g} would train another policy than is published and sampled from; "
            "it must be 0"
        )
    if lora.rank > MOST_RANK:
        yield f"training.lora.rank: the engine serves adapters up to rank {MOST_RANK}, not {lora.rank}"
    if not lora.target_modules:
        yield "training.lora.target_modules: name at least one module, or say all-linear"
    edges = [name for name in lora.target_modules if name in EDGES] if isinstance(lora.target_modules, tuple) else []
    if edges:
        yield (
            f"training.lora.target_modules: {', '.join(edges)} cannot have an adapter: the output head is applied to "
            "chosen tokens by its weight alone, may be the embedding itself, and engines serve no adapter of either"
        )

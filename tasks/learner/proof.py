"""Proof that a model computes in packed rows what it computes of each text alone, made before anything is trained.

No list says which families can be trained. Three texts are computed as one packed row, and each by transformers with
its own attention and its own output head. Log-probs and gradients must agree: so neither a state that is carried into
the next segment, nor a window, a soft cap or a sink that is left out, nor a head that does more, goes unseen. That the
engine computes the same is proven beside it (`tasks.inference.engine.checks`), on a text of `proof_length` too.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tasks.learner.attention import ATTENTION, Segments
from tasks.learner.distributed import ALONE, World, local
from tasks.learner.protocol import LONGEST_WINDOW, LearnerError
from tasks.learner.shards import EXPERTS

SHORTEST, LONGEST = 96, LONGEST_WINDOW + 32
"""Tokens of the longest text: more than a chunk of gated DeltaNet (64), and beyond a window where that is no more."""
BEYOND = 32
"""How many tokens of it are beyond the window."""
COMPARED = 48
"""Tokens at each end of a text whose log-probs are compared."""
SAMPLED = 4096
"""Numbers of each parameter's gradient that are compared, on each rank."""


class ProofBounds(NamedTuple):
    """Largest differences, as shares of what is compared: sums over tokens, and the norm of gradients."""

    logprobs: float
    """Of log-probs in the packed row from those of transformers."""
    repeated: float
    """Of log-probs of one text at the end of the row from those at its beginning."""
    gradient: float
    states: float
    """Of the states of a layer that is said to differ."""


EXACT, HALF = ProofBounds(1e-5, 1e-5, 1e-4, 1e-4), ProofBounds(0.02, 2e-3, 0.3, 0.05)
"""In float32, and where layers are computed in bfloat16."""
COARSE = ProofBounds(0.1, 2e-3, 0.8, 0.05)
"""With experts in bfloat16 some tokens get other ones by rounding alone; products in 8 bits differ by as much."""


def proof_length(config: Any) -> int:
    """Return how long a text must be that shows what layers do, in tokens; `config` is that of the text model.

    A window that no text of LONGEST tokens reaches is not proven, and has no bearing on shorter samples.
    """
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    wanted = max((window + BEYOND for window in windows if window + BEYOND <= LONGEST), default=0)
    return min(max(SHORTEST, wanted), getattr(config, "max_position_embeddings", None) or LONGEST)


def proof_bounds(causal: nn.Module, half: bool, fp8: bool) -> ProofBounds:
    """Return what is allowed of a model whose layers are computed in bfloat16, or from it in 8 bits."""
    routed = any(EXPERTS in name for name, _ in causal.named_parameters())
    return (COARSE if routed or fp8 else HALF) if half else EXACT


def prove(policy: Any, device: torch.device, bounds: ProofBounds, world: World = ALONE) -> dict[str, float]:
    """Compare a packed row of a `PolicyModel` with its texts alone; return what was measured, by name.

    All ranks call this together. Raises LearnerError, with the class of the first layer that differs, where it is more
    than the bounds allow.
    """
    begin, longest = time.perf_counter(), proof_length(policy.causal.config.get_text_config())
    found = [0.0, 0.0, 0.0]
    for length in sorted({min(longest, SHORTEST), longest}):
        texts = _texts(policy, length, device)
        # Gradients of long texts would keep the scores of all layers.
        with torch.set_grad_enabled(length <= SHORTEST):
            measured = world.gather(_compare(policy, texts, device))
        found = [max(values) for values in zip(found, *measured, strict=True)]
        if any(value > bound for value, bound in zip(found, bounds, strict=False)):
            raise _refusal(policy, _first_different(policy, texts, device, bounds.states), found, bounds)
    return {"proof_logprobs": found[0], "proof_gradient": found[2], "seconds_proof": time.perf_counter() - begin}


def _refusal(policy: Any, part: str, found: Sequence[float], bounds: ProofBounds) -> LearnerError:
    return LearnerError(
        f"{type(policy.causal).__name__}: its {part} computes something else in a packed row than of a text alone: "
        f"log-probs differ by {found[0]:.2g} of their size (allowed are {bounds.logprobs:g}), those of one text at two "
        f"places by {found[1]:.2g} ({bounds.repeated:g}), gradients by {found[2]:.2g} ({bounds.gradient:g}); nothing "
        "was trained. Take another model (docs/models.md)"
    )


def _texts(policy: Any, length: int, device: torch.device) -> list[Tensor]:
    """Return a text of a length, one of half of it, and the first again."""
    # Low ids: the high ones are those of control tokens, of which some stand for images.
    size, place = min(policy.causal.config.get_text_config().vocab_size, 251), torch.arange(length, device=device)
    first, second = (7 * place + place**2 // 3) % size, (11 * place + place**2 // 5) % size
    return [first, second[: length // 2], first]


def _compare(policy: Any, texts: list[Tensor], device: torch.device) -> tuple[float, float, float]:
    """Return by how much a packed row differs, in the order of `ProofBounds`."""
    packed, of_packed = _measure(policy, [texts], device, alone=False)
    with _as_transformers(policy):
        alone, of_alone = _measure(policy, [[text] for text in texts], device, alone=True)
    size = len(_predictors(texts[0]))
    return _share(packed, alone), _share(packed[-size:], packed[:size]), _share(of_packed, of_alone)


def _predictors(text: Tensor) -> Tensor:
    """Return the places of the tokens of a text whose next one is compared."""
    places = torch.arange(len(text) - 1, device=text.device)
    return places[(places < COMPARED) | (places >= len(places) - COMPARED)]


def _measure(policy: Any, rows: Sequence[Sequence[Tensor]], device: torch.device, alone: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all texts, and numbers of the gradient of their weighted sum on this rank."""
    values, begun = [], 0
    for texts in rows:
        borders = (0, *accumulate(len(text) for text in texts))
        predictors = torch.cat([_predictors(text) + start for text, start in zip(texts, borders, strict=False)])
        token_ids = torch.cat(list(texts))
        ones = torch.ones(len(predictors), device=device)
        logprobs, _ = policy(
            token_ids,
            torch.cat([torch.arange(len(text), device=device) for text in texts]),
            None if alone else Segments(borders, device),
            predictors,
            token_ids[predictors + 1],
            ones,
        )
        # No two alike, so that no gradient cancels another one.
        weights = torch.arange(begun, begun + len(logprobs), device=device).cos()
        if torch.is_grad_enabled():
            (logprobs * weights).sum().backward()
        values.append(logprobs.detach().float().cpu())
        begun += len(logprobs)
    sampled = torch.cat([_gradient(parameter) for parameter in policy.parameters() if parameter.requires_grad])
    policy.zero_grad(set_to_none=True)
    return torch.cat(values), sampled


def _gradient(parameter: Tensor) -> Tensor:
    numbers = local(parameter.detach() if parameter.grad is None else parameter.grad).flatten()[:SAMPLED].float().cpu()
    return torch.zeros_like(numbers) if parameter.grad is None else numbers


@contextmanager
def _as_transformers(policy: Any) -> Iterator[None]:
    """Have layers attend by transformers' plainest attention, with masks of its own, and run uncompiled."""
    decoder = policy.causal.get_decoder()
    decoder.set_attn_implementation("eager")
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        decoder.set_attn_implementation(ATTENTION)


def _share(found: Tensor, expected: Tensor) -> float:
    """Return the size of the difference as a share of what is expected; infinite where it is no number."""
    far, size = float((found - expected).norm()), float(expected.norm())
    return far / max(size, 1e-12) if math.isfinite(far) else math.inf


@torch.no_grad()
def _first_different(policy: Any, texts: list[Tensor], device: torch.device, bound: float) -> str:
    """Return the class of the innermost module that makes other states of the same ones, and its place in the model."""
    end = sum(map(len, texts))
    part = slice(end - len(texts[-1]), end)
    with torch.compiler.set_stance("force_eager"):
        packed = _states(policy, texts, Segments((0, *accumulate(map(len, texts))), device), part)
    with _as_transformers(policy):
        alone = _states(policy, texts[-1:], None, slice(None))
    for name, (module, before, after) in packed.items():
        if name in alone and before.shape == alone[name][1].shape:
            _, before_alone, after_alone = alone[name]
            if _share(before, before_alone) <= bound < _share(after, after_alone):
                return f"layer {type(module).__name__} ({name})"
    return "output head"


def _states(
    policy: Any, texts: Sequence[Tensor], segments: Segments | None, part: slice
) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Return what goes into each module of the layers and comes out, for a part of the row, inner ones first."""
    token_ids = torch.cat(list(texts))
    found: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def take(name: str, module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        before = next(filter(_is_states, (*arguments, *options.values())), None)
        after = output[0] if isinstance(output, tuple) else output
        if before is not None and _is_states(after):
            found[name] = module, before[0, part].float(), after[0, part].float()

    def _is_states(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == (1, len(token_ids))

    handles = []
    for name, module in policy.layers().named_modules():
        hook = lambda *of_call, name=name: take(name, *of_call)  # noqa: E731
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    positions = torch.cat([torch.arange(len(text), device=token_ids.device) for text in texts])
    place = torch.zeros(1, dtype=torch.int64, device=token_ids.device)
    try:
        policy(token_ids, positions, segments, place, place, torch.ones(1, device=token_ids.device))
    finally:
        for handle in handles:
            handle.remove()
    return found

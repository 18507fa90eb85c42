"""The policy: a causal language model that returns log-probs and entropies of selected tokens of a packed row."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from configs.training import TrainingConfig
from tasks.learner import adapters
from tasks.learner.adapters import Adapter
from tasks.learner.attention import Segments, has_kernel
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.distributed import ALONE, World, shard, to_device
from tasks.learner.fp8 import use_fp8
from tasks.learner.head import PLAIN, capped_kernels, compiled_kernels, default_chunk, fused_loss, token_logprobs
from tasks.learner.loading import read_model
from tasks.learner.proof import proof_bounds, prove
from tasks.learner.protocol import LearnerError
from tasks.learner.recompute import recompute_layers
from tasks.learner.recurrent import CurrentRow, run_by_segment
from tasks.learner.router_losses import RouterLosses
from tasks.learner.router_replay import RouterReplay
from tasks.learner.rows import Row, RowPart
from tasks.learner.shards import EXPERTS
from tasks.learner.vision import SeenImages, decoder_inputs, grid_positions, merge_size, tower_of


class PolicyModel(nn.Module):
    """A causal model whose output head is applied to selected tokens only.

    The head is used inside `forward`, where a sharded weight is gathered; tied and untied heads are alike here.
    """

    def __init__(self, causal: Any, chunk: int, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.chunk = chunk
        self.compiled: Callable[[Any], Any] | None = None
        """Compiles what is called beside the layers, if they are compiled."""
        self.adapter = adapter
        """Trained in place of the weights, if not None."""
        self.context: ContextGroup | None = None
        """The ranks that share a row with this one."""
        self.shares_prefixes = False
        """Whether what segments of a row have in common is computed once."""
        self.replay: RouterReplay | None = None
        """Has routers choose recorded experts, if not None."""
        self.router_losses: RouterLosses | None = None
        """Auxiliary losses of routers, if some are trained."""
        self.row = CurrentRow()
        """What layers with a state read."""
        self.proof: dict[str, float] = {}
        """What `tasks.learner.proof` measured of it, until an update reports that."""
        config = causal.config.get_text_config()
        scale, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        self._logit_scale = scale / divisor
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        segments: Segments | None,
        predictors: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        loss: Callable[[Tensor, slice], Tensor] | None = None,
        images: SeenImages | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies (N,) of `targets` (N,), each predicted by a token of `predictors` (N,).

        `token_ids` and `positions` are what is computed of a packed row, (t,); `predictors` are places among
        these, and `temperatures` (N,) belong to the targets. With a `loss`, see `fused_loss`, return it first, and
        log-probs and entropies detached. Of a row that shows `images`, `positions` are (3, t). `experts` are recorded
        ones, (t, layers, k).

        Without `segments` the tokens are one text, and log-probs follow from the logits that transformers computes.
        """
        self.row.segments = segments
        if self.router_losses:
            self.router_losses.begin(predictors)
        if segments is None:
            return self._by_transformers(token_ids, positions, predictors, targets, temperatures)
        if self.replay:
            self.replay.begin(experts, len(token_ids))
        given = decoder_inputs(self.causal, token_ids, images) or {"input_ids": token_ids[None]}
        positions = positions[:, None] if positions.ndim > 1 else positions[None]
        hidden = self.causal.get_decoder()(
            position_ids=positions, use_cache=False, segments=segments, **given
        ).last_hidden_state[0]
        weight = self.causal.get_output_embeddings().weight
        if self._logit_scale != 1.0:
            temperatures = temperatures / self._logit_scale
        inputs = hidden[predictors], weight, targets, temperatures, self.chunk
        kernels = compiled_kernels(self.compiled) if self.compiled else PLAIN
        kernels = capped_kernels(kernels, self._softcap) if self._softcap else kernels
        return fused_loss(*inputs, loss, kernels) if loss else token_logprobs(*inputs, kernels)

    def _by_transformers(
        self, token_ids: Tensor, positions: Tensor, predictors: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, ...]:
        given = {"input_ids": token_ids[None], "position_ids": positions[None], "logits_to_keep": predictors}
        logits = self.causal(use_cache=False, **given).logits[0].float() / temperatures[:, None]
        logp = logits.log_softmax(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    def layers(self) -> nn.ModuleList:
        """Return the decoder's stack of layers: the longest list of modules in it."""
        stacks = [child for child in self.causal.get_decoder().children() if isinstance(child, nn.ModuleList)]
        if not stacks:
            raise LearnerError(f"{type(self.causal).__name__} has no stack of layers: take a decoder of text")
        return max(stacks, key=len)


def load_policy(
    directory: Path,
    settings: TrainingConfig,
    device: torch.device,
    adapter: Adapter | None = None,
    world: World = ALONE,
) -> PolicyModel:
    """Return the policy in `directory`, or `adapter` over its base; float32 master weights, sharded over the ranks.

    Raises LearnerError when the directory is no complete model, it computes something else in a packed row than alone
    (`tasks.learner.proof`), or its heads or layers cannot be dealt to the ranks that share a row.
    """
    placed: list[PolicyModel] = []

    def place(causal: Any, stored: dict[str, Any]) -> None:
        placed.append(_place(causal, stored, settings, device, adapter, world))

    world.agree(lambda: read_model(adapter.base_directory if adapter else directory, place))
    policy = placed[0].to(device)
    # Layers recompute their activations in training mode alone; dropout is off by now.
    policy.train()
    bounds = proof_bounds(policy.causal, computes_in_half(settings, device), settings.fp8)
    policy.proof = prove(policy, device, bounds, world)
    # Last: it is proven by every rank for itself.
    policy.context = world.context
    policy.shares_prefixes = settings.shared_prefixes and world.context is None
    return policy


def computes_in_half(settings: TrainingConfig, device: torch.device) -> bool:
    """Whether forward and backward run in bfloat16; "auto" does on CUDA only."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.type == "cuda")


def compiles(settings: TrainingConfig, device: torch.device) -> bool:
    """Whether layers are compiled; "auto" does on CUDA in bfloat16. Raises LearnerError where that is impossible.

    Only torch's attention kernel takes rows of all lengths and segments in one form.
    """
    if settings.compile == "auto":
        return device.type == "cuda" and computes_in_half(settings, device)
    precision = torch.bfloat16 if computes_in_half(settings, device) else torch.float32
    if settings.compile and not has_kernel(device, precision):
        raise LearnerError(
            f"training.compile is true, but on {device.type} in {precision} layers cannot be compiled once for all "
            "rows; nothing was loaded. Leave it at auto, which compiles on CUDA in bfloat16"
        )
    return settings.compile


def run_row(policy: PolicyModel, row: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (N,) of the row's weighted tokens at the row's temperatures."""
    logprobs, entropies = policy(**_inputs(policy, row, device))
    return _complete(policy, row, logprobs), _complete(policy, row, entropies)


def row_loss(
    policy: PolicyModel, row: Row, device: torch.device, loss: Callable[[Tensor, slice], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of the row's weighted tokens and, detached, what `run_row` returns; see `fused_loss`.

    Where ranks share the row it is the loss of this rank's tokens.
    """
    total, logprobs, entropies = policy(**_inputs(policy, row, device), loss=loss)
    return total, _complete(policy, row, logprobs), _complete(policy, row, entropies)


def own_tokens(policy: PolicyModel, row: Row) -> slice:
    """Return which of a row's weighted tokens this rank predicts."""
    # Most rows are a rank's own: their parts are not cut a second time.
    return _part(policy, row).own if policy.context else slice(None)


def _part(policy: PolicyModel, row: Row) -> RowPart:
    if policy.context:
        return row.part(policy.context.rank, policy.context.size)
    return row.part(shares=policy.shares_prefixes)


def _complete(policy: PolicyModel, row: Row, values: Tensor) -> Tensor:
    if policy.context is None:
        return values
    return policy.context.complete(values, own_tokens(policy, row), len(row.weighted))


def _inputs(policy: PolicyModel, row: Row, device: torch.device) -> dict[str, Any]:
    """Return what a policy is called with for a row."""
    part, images = _part(policy, row), row.images
    positions = part.positions
    if images is not None:
        positions = grid_positions(positions, row.borders, images, merge_size(policy.causal))
    return {
        "token_ids": to_device(part.token_ids, device),
        "positions": to_device(positions, device),
        "segments": Segments(part.borders, device, policy.context, part.shared),
        "predictors": to_device(part.predictors, device),
        "targets": to_device(part.targets, device),
        "temperatures": to_device(row.streams["temperatures"][row.weighted[part.own]], device),
        "images": None if images is None else SeenImages.of(images, device),
        "experts": None if part.experts is None else to_device(part.experts.astype(np.int64), device),
    }


def _place(
    causal: Any,
    stored: dict[str, Any],
    settings: TrainingConfig,
    device: torch.device,
    adapter: Adapter | None,
    world: World,
) -> PolicyModel:
    """Return the policy of a model on the meta device, sharded and ready to be filled from what is `stored`."""
    tower = tower_of(causal)
    if world.context:
        world.context.require_heads(causal.config.get_text_config())
    if tower is not None and (adapter or world.context):
        setting = "training.lora" if adapter else "learner.context_parallel"
        raise LearnerError(
            f"{setting}: models that see are trained whole and with whole rows; nothing was loaded. Leave {setting} out"
        )
    causal.config.use_cache = False
    if any(EXPERTS in name for name, _ in causal.named_parameters()):
        # On a GPU the products of all experts are one kernel; on the CPU each expert is faster by itself.
        causal.set_experts_implementation("eager" if device.type == "cpu" else "grouped_mm")
    causal.tie_weights()
    if adapter:
        adapters.attach(causal, adapter, stored)
    chunk = int(settings.logprob_chunk or default_chunk(causal.config.get_text_config().vocab_size, device))
    policy = PolicyModel(causal, chunk, adapter)
    _switch_off_dropout(policy)
    if tower is not None and settings.vision == "frozen":
        tower.requires_grad_(False)
    if settings.fp8:
        use_fp8(policy.layers())
    # Shards around recompute and compiled layers: what gathers weights must not be part of a graph.
    recompute_layers(causal, policy.layers(), settings, device)
    if settings.router_replay == "rollout":
        policy.replay = RouterReplay(policy.layers(), device)
    if settings.router_aux_loss_coef or settings.router_z_loss_coef:
        policy.router_losses = RouterLosses(causal, policy.layers(), settings)
    num_recurrent = run_by_segment(policy.layers(), policy.row)
    if num_recurrent and world.context:
        raise LearnerError(
            f"learner.context_parallel: {num_recurrent} layers of the model carry a state along a row, which ranks "
            "that share it cannot compute; nothing was loaded. Set learner.context_parallel to 1"
        )
    if compiles(settings, device) and _can_be_compiled(causal, num_recurrent, settings, world):
        compile_policy(policy, device, one_graph=settings.compile is True)
    half = computes_in_half(settings, device)
    shard(policy, policy.layers(), device, half, world.replicas, world.expert_parallel)
    return policy


def _can_be_compiled(causal: Any, num_recurrent: int, settings: TrainingConfig, world: World) -> bool:
    """Whether all layers take rows of all lengths in one form; raises LearnerError where that must be and is not."""
    sinks = any(name.endswith(".sinks") for name, _ in causal.named_parameters())
    softcap = getattr(causal.config.get_text_config(), "attn_logit_softcapping", None)
    others = num_recurrent or sinks or softcap or world.expert_parallel > 1
    if settings.compile is True and others:
        raise LearnerError(
            "training.compile is true, but the model has layers with a state, soft caps or sinks, which run segment by "
            "segment, or experts that are dealt to ranks (learner.expert_parallel), and cannot be compiled once for "
            "all rows; nothing was loaded. Leave it at auto"
        )
    return not others


def compile_policy(policy: PolicyModel, device: torch.device, one_graph: bool, backend: Any = None) -> None:
    """Compile layers and last norm in place when they are first called, and what the head does between its products.

    Layers that are alike share what was compiled. `backend` is that of `torch.compile`.
    """
    # On the CPU nothing is fused, and no C++ compiler is needed: there it only shows that layers can be compiled.
    # Else numbers that are the same in the first row, say of borders and of a head's width, are taken for one number.
    fx_config.use_duck_shape = False
    backend = backend or ("inductor" if device.type == "cuda" else "aot_eager")
    norm = getattr(policy.causal.get_decoder(), "norm", None)
    for module in (*policy.layers(), *([norm] if norm is not None else [])):
        # Dynamic: the lengths of row and segments are symbols from the first row on, or each would be compiled again.
        module.compile(backend=backend, fullgraph=one_graph, dynamic=True)
    policy.compiled = partial(_compile_once, backend=backend, fullgraph=one_graph)


@cache
def _compile_once(function: Callable[..., Any], backend: Any, fullgraph: bool) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=True)


def _switch_off_dropout(policy: nn.Module) -> None:
    """Set dropout to zero: the log-probs of the update must be those of the published policy."""
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)

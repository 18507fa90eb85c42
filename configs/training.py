"""The section of the training stage, with those of optimizers, learning-rate schedules and low-rank adapters."""

from typing import Annotated, Literal

from pydantic import Field

from configs.fields import Section, later, operational
from configs.losses import DppoLoss, LossConfig, RefKlConfig

KEPT = "(last|(last|every):0*[1-9][0-9]{0,8})"
"""A part of `training.keep_weights`."""
FP8_MULTIPLE = 16
"""CUDA multiplies matrices in 8 bits whose widths, and the rows of the second, are multiples of this."""


class OptimizerSection(Section):
    """What every optimizer's section says of it."""

    type: str

    @property
    def state_kind(self) -> str:
        """What its saved state is; an optimizer of another kind cannot go on from it. Empty keeps none."""
        return self.type


class AdamwOptimizer(OptimizerSection):
    """AdamW over all parameters, by `betas`, `epsilon` and `weight_decay` of the training section."""

    type: Literal["adamw"] = "adamw"


class MuonOptimizer(OptimizerSection):
    """Muon over the matrices of the layers; AdamW over embeddings, the output head, norms, biases and all else."""

    type: Literal["muon"] = "muon"
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of Muon's matrices, on the same schedule; null is `training.learning_rate`."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Share of the old momentum in the new one."""
    nesterov: bool = True
    """Whether the momentum looks one gradient ahead."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make the update orthogonal."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of an update of A rows and B columns: match_rms_adamw is 0.2 sqrt(max(A, B)), so that AdamW's learning rate
    fits; original is sqrt(max(1, A / B))."""


class SignSgdOptimizer(OptimizerSection):
    """The sign of the gradient's moving average (Signum), or of the gradient itself (signSGD), over all parameters."""

    type: Literal["sign_sgd"] = "sign_sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the old average in the new one; 0 takes the gradient's own sign and keeps no state."""

    @property
    def state_kind(self) -> str:
        return self.type if self.momentum else ""


OptimizerConfig = Annotated[AdamwOptimizer | MuonOptimizer | SignSgdOptimizer, Field(discriminator="type")]


class ConstantSchedule(Section):
    """The peak after warm-up, for ever."""

    type: Literal["constant"] = "constant"


class DecaySchedule(Section):
    """What the schedules that decay have in common."""

    min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that is left at `decay_steps` and after."""


class LinearSchedule(DecaySchedule):
    """A straight line from the end of warm-up to `decay_steps`; without `decay_steps` the rate stays at the peak."""

    type: Literal["linear"] = "linear"


class CosineSchedule(DecaySchedule):
    """Half a cosine from the end of warm-up to `decay_steps`."""

    type: Literal["cosine"] = "cosine"


class WsdSchedule(DecaySchedule):
    """Warm-up, stable, decay: the peak until shortly before `decay_steps`, then down."""

    type: Literal["wsd"] = "wsd"
    final_steps: int = Field(ge=1)
    """Steps of the decay; it begins at `decay_steps - final_steps`."""
    shape: Literal["sqrt", "linear"] = "sqrt"
    """How it falls over the decay's share x that is done: sqrt is 1 - sqrt(x), linear is 1 - x."""


ScheduleConfig = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="type")
]


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


class TrainingConfig(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; the rate is a pure function of the step."""
    decay_steps: int = Field(0, ge=0)
    """Step at which the decay after warm-up has reached its end; 0 keeps the rate constant."""
    schedule: ScheduleConfig = LinearSchedule()
    """How the rate falls from the end of warm-up to `decay_steps`."""
    optimizer: OptimizerConfig = AdamwOptimizer()
    """What makes an update of a gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only, with every optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    loss: LossConfig = DppoLoss()
    """The rl component."""
    ref_kl: RefKlConfig = RefKlConfig()
    """The ref_kl component."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights; null trains the weights."""
    vision: Literal["frozen", "trained"] = later("frozen")
    """Whether the part of a model that looks at images is trained, or what reads its output alone. Models of text have
    no such part."""
    router_replay: Literal["off", "rollout"] = later("off")
    """Of models with experts: rollout records the experts that the engine chose for each token, and the learner takes
    these in place of its own choice (R3, arXiv 2510.11370). It routes tokens without a record itself."""
    router_aux_loss_coef: float = later(0.0, ge=0)
    """Weight of the load-balancing loss of routers (Switch Transformer, arXiv 2101.03961) of a model with experts."""
    router_z_loss_coef: float = later(0.0, ge=0)
    """Weight of the loss that keeps the logits of routers small (z-loss of ST-MoE, arXiv 2202.08906)."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute precision; auto is float32 on the CPU and bfloat16 on CUDA. Master weights are float32."""
    fp8: bool = later(False)
    """Whether linear maps of layers compute their products, also those of the gradient, in 8 bits (e4m3), with a scale
    for each row of both operands. Embedding, output head, norms, attention, routers and stacked experts do not, nor
    maps whose widths are no multiples of 16. Weights stay in float32 and policies as they are. Needs `dtype` bfloat16
    and a GPU of compute capability 8.9."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where to train; auto takes CUDA when there is one. Filled in when resolved."""
    policy_dtype: Literal["float32", "bfloat16"] = later("float32")
    """Precision in which policies are published. bfloat16 needs `dtype` bfloat16, so that a policy is what the model is
    computed with; all ranks then write it, and the float32 weights are saved with the optimizer state. Adapters are
    always in float32."""
    compile: bool | Literal["auto"] = later("auto")
    """Whether the layers are compiled, which fuses their element-wise work: auto is on CUDA in bfloat16, where alone it
    can be. With true a layer that is not one graph is an error; auto takes it in parts."""
    deterministic: bool = later(True)
    """Whether kernels that add up in a fixed order are taken on CUDA, so that the same batches give the same weights to
    the last bit; an operation without one ends the run. On the CPU they always are."""
    logprob_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Tokens whose logits exist at the same time. Null takes a power of two from 64 to 1024 for which a chunk of logits
    has 128 MiB, or 1 GiB on CUDA: 128 or 1024 with a vocabulary of 151,936. auto takes 4096 on a GPU of 80 GB or more
    where they fit by the memory plan (`stagecoach check`), else as null. Filled in when resolved."""
    shared_prefixes: bool = later(True)
    """What samples of a packed row have in common from their first token on, as all rollouts of a task have its prompt,
    is computed once. Not where ranks share a row, nor in rows that show images."""
    gradient_checkpointing: bool | Literal["selective", "auto"] = "auto"
    """Recompute activations in the backward pass: less memory, more time. selective keeps the results of matrix
    products and attention, and recomputes what is cheap; true keeps the inputs of layers alone. auto takes the first of
    false, selective and true that fits on CUDA, by the memory plan (`stagecoach check`), and false on the CPU. Filled
    in when resolved."""
    checkpoint_every: int = Field(1, ge=1)
    """Only every n-th layer is recomputed, the first included; the other layers keep their activations."""
    offload_activations: bool = False
    """The inputs of recomputed layers are moved to the host's memory, where they already are in training on the CPU.
    The activations of other layers stay."""
    save_optimizer_every: int = operational(1, ge=1)
    """Optimizer state is saved with every n-th policy, weights with every policy. A policy without it is resumed by
    training the recorded batches again."""
    keep_weights: str = operational("all", pattern=f"^(all|{KEPT}(,{KEPT})?)$")
    """Which policies keep their weights during the run: `all`, `last:N`, `every:N`, or `last:N,every:N`. The first
    policy, the policies that the next step and evaluations need, and the newest one with optimizer state always stay.
    The rows of tables always stay."""
    version: str = ""
    """Version of torch and transformers; filled in when resolved."""

"""What must hold of the training section: schedule, loss and adapters."""

from collections.abc import Iterator

from configs.losses import CispoLoss, LossConfig, TruncatedImportance
from configs.run import RunConfig
from configs.services import LearnerConfig
from configs.training import LoraConfig, TrainingConfig

MAX_RANK = 512
"""The largest adapter that the engine has room for."""
EDGES = ("lm_head", "embed_tokens", "wte", "embed_out")
"""Names of the embedding and the output head, which get no adapter."""


def training_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing in the training section that cannot work."""
    training = config.training
    if training.decay_steps and training.decay_steps <= training.warmup_steps:
        yield (
            f"training.decay_steps: the rate reaches zero at step {training.decay_steps}, "
            f"before training.warmup_steps {training.warmup_steps} is over"
        )
    yield from _schedule_problems(training)
    yield from lora_problems(training.lora)
    yield from _expert_adapter_problems(config)
    if any(not 0 <= beta < 1 for beta in training.betas):
        yield f"training.betas: {training.betas}: each is at least 0 and below 1"
    yield from _rank_problems(config.learner, on_pool := config.placement.services == "pools")
    if config.learner.memory_directory and (on_pool or config.learner.nodes > 1):
        elsewhere = "with placement.services=pools" if on_pool else f"with learner.nodes={config.learner.nodes}"
        yield (
            f"learner.memory_directory: it is the memory of one machine, and {elsewhere} the learner has another one "
            "than the run; leave it empty, and learner.keep_state false"
        )
    if not training.deterministic and training.save_optimizer_every != 1:
        yield (
            f"training.deterministic: with training.save_optimizer_every {training.save_optimizer_every} a learner "
            "that was lost trains recorded batches again, which must give the same weights; make that 1"
        )
    if config.learner.keep_state and not config.learner.memory_directory:
        yield "learner.keep_state: there is no place for it; set learner.memory_directory, for example to /dev/shm"
    in_float = training.dtype == "float32" or (training.dtype == "auto" and training.device == "cpu")
    if training.policy_dtype == "bfloat16" and in_float:
        yield (
            "training.policy_dtype: bfloat16, but the model is computed in float32, so that what samples would not be "
            "what is trained; set training.dtype=bfloat16"
        )
    if training.fp8 and (in_float or training.lora):
        reason = "adapters (training.lora) have ranks too small for it" if training.lora else "the model is in float32"
        yield f"training.fp8: products in 8 bits are those of a whole model in bfloat16, and {reason}; leave it false"
    if training.compile is True and (training.device == "cpu" or training.dtype == "float32"):
        yield (
            f"training.compile: layers are compiled on CUDA in bfloat16 alone, not on {training.device} in "
            f"{training.dtype}; leave it at auto"
        )
    if training.compile is True and config.learner.expert_parallel > 1:
        yield "training.compile: layers whose experts are dealt out (learner.expert_parallel) are not; leave it at auto"
    if training.lora and (training.router_aux_loss_coef or training.router_z_loss_coef):
        yield (
            "training.router_aux_loss_coef, training.router_z_loss_coef: with adapters (training.lora) routers stay as "
            "they are; leave both 0"
        )
    if config.packing.shared_prefixes and (not training.shared_prefixes or config.learner.context_parallel > 1):
        yield (
            "packing.shared_prefixes: with training.shared_prefixes=false, and where ranks share a row "
            "(learner.context_parallel), nothing is computed once; leave it false"
        )
    yield from loss_problems(training.loss)


def _rank_problems(learner: LearnerConfig, on_pool: bool) -> Iterator[str]:
    for name in ("replicas", "context_parallel"):
        if learner.num_ranks % (number := getattr(learner, name)):
            yield f"learner.{name}: {number} does not divide the {learner.num_ranks} processes of all nodes"
    if (of_copy := learner.num_ranks // learner.replicas) % learner.expert_parallel:
        yield (
            f"learner.expert_parallel: {learner.expert_parallel} does not divide the {of_copy} processes of a copy of "
            "the weights"
        )
    if on_pool:
        if learner.rendezvous:
            yield (
                f"learner.rendezvous: {learner.rendezvous!r}, but with placement.services=pools the first node says by "
                "itself where the others meet it; leave it empty"
            )
        return
    host, _, port = learner.rendezvous.rpartition(":")
    if learner.nodes > 1 and not (host and port.isdigit()):
        yield (
            f"learner.rendezvous: {learner.rendezvous!r}, but {learner.nodes} nodes meet at HOST:PORT of the run's own "
            "machine, for example node-0:29500"
        )


def _schedule_problems(training: TrainingConfig) -> Iterator[str]:
    schedule = training.schedule
    if schedule.type == "constant" and training.decay_steps:
        yield f"training.decay_steps: {training.decay_steps}, but training.schedule 'constant' has no decay; take 0"
    # A straight line down to zero is the default, and without an end it stays at the peak; a floor asks for a decay.
    falls = schedule.type in ("cosine", "wsd") or (schedule.type == "linear" and schedule.min_ratio > 0)
    if falls and not training.decay_steps:
        yield f"training.decay_steps: training.schedule {schedule.type!r} needs the step at which its decay ends"
    stable = training.decay_steps - training.warmup_steps
    if schedule.type == "wsd" and 0 < stable < schedule.final_steps:
        yield (
            f"training.schedule.final_steps: a decay of {schedule.final_steps} steps that ends at training.decay_steps "
            f"{training.decay_steps} begins before training.warmup_steps {training.warmup_steps} is over"
        )
    if training.gradient_checkpointing in (False, "auto") and training.checkpoint_every != 1:
        yield "training.checkpoint_every: without training.gradient_checkpointing no layer is recomputed"
    if training.gradient_checkpointing is not True and training.offload_activations:
        yield "training.offload_activations: without training.gradient_checkpointing = true nothing is offloaded"


def _expert_adapter_problems(config: RunConfig) -> Iterator[str]:
    maps = config.training.lora.target_modules if config.training.lora else ()
    is_served = not config.from_data or config.evaluation.evaluates_training
    named = isinstance(maps, tuple) and any(name.endswith("experts") for name in maps)
    if named and (is_served or config.learner.expert_parallel > 1):
        yield (
            "training.lora.target_modules: adapters of experts are trained by runs of kind sft that evaluate nothing, "
            "with learner.expert_parallel 1, and exported merged: no engine was seen to serve them. Name maps of "
            "attention, or train all weights"
        )


def lora_problems(lora: LoraConfig | None) -> Iterator[str]:
    """Yield one line for each thing in the section that cannot work."""
    if lora is None:
        return
    if lora.dropout != 0:
        yield (
            f"training.lora.dropout: {lora.dropout:g} would train another policy than is published and sampled from; "
            "it must be 0"
        )
    if lora.rank > MAX_RANK:
        yield f"training.lora.rank: the engine serves adapters up to rank {MAX_RANK}, not {lora.rank}"
    if not lora.target_modules:
        yield "training.lora.target_modules: name at least one module, or say all-linear"
    edges = [name for name in lora.target_modules if name in EDGES] if isinstance(lora.target_modules, tuple) else []
    if edges:
        yield (
            f"training.lora.target_modules: {', '.join(edges)} cannot have an adapter: the output head is applied to "
            "chosen tokens by its weight alone, may be the embedding itself, and engines serve no adapter of either"
        )


def loss_problems(loss: LossConfig) -> Iterator[str]:
    """Yield one line for each setting of a loss that cannot work, under its place in `training.loss`."""
    mask = loss.sequence_mask
    if mask is not None and mask.low is None and mask.high is None:
        yield "training.loss.sequence_mask: low and high are both null, so it masks nothing; set one, or drop the mask"
    if mask is not None and mask.low is not None and mask.high is not None and mask.low >= mask.high:
        yield f"training.loss.sequence_mask: low {mask.low} is not below high {mask.high}, so it masks everything"
    if isinstance(loss, CispoLoss) and loss.tis is not None:
        yield from _cap_problems(loss, loss.tis)


def _cap_problems(loss: CispoLoss, tis: TruncatedImportance) -> Iterator[str]:
    least, most = 1 - loss.clip_low, 1 + loss.clip_high
    if tis.level == "token" and tis.cap >= most:
        yield (
            f"training.loss.tis.cap: cispo clips the same ratios at {most} (1 + clip_high) already, so a cap of "
            f"{tis.cap} does nothing; take level 'sequence', or drop tis"
        )
    if tis.cap <= least:
        yield (
            f"training.loss.tis.cap: {tis.cap} is not above cispo's least weight {least} (1 - clip_low), so that all "
            "weights would be the same"
        )

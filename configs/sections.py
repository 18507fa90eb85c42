"""The sections of the model, assignment and its samplers, rollout, packing and supervised data.

Fields marked `operational` never change rows (addresses, threads, time limits, logging) and are left out of keys;
everything else in a section that a stage declares is part of that stage's key.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from configs.fields import Section, later, operational
from configs.sampling import SamplingConfig


class StandardSampler(Section):
    """Each environment's examples come in epochs: all of them once, in an order of their own, then all again."""

    stateful: ClassVar[bool] = False
    """Whether it goes by what the steps before came to, in table `difficulties`."""
    type: Literal["standard"] = "standard"


class DifficultyPool(Section):
    """The examples whose last group earned a mean reward above the pool before and up to a threshold."""

    name: str = Field(min_length=1)
    """Name of the pool."""
    threshold: float
    """Highest mean reward of an example in it; the last pool has the examples above its own, too."""
    weight: float = Field(gt=0)
    """Weight of an example in it when examples are drawn, relative to the other pools' weights."""


class DifficultyPoolsSampler(Section):
    """Examples are drawn by weight: how hard one was when it was tried last says to which pool it belongs."""

    stateful: ClassVar[bool] = True
    type: Literal["difficulty_pools"] = "difficulty_pools"
    pools: tuple[DifficultyPool, ...] = Field(
        (
            DifficultyPool(name="hard", threshold=0.25, weight=0.2),
            DifficultyPool(name="normal", threshold=0.75, weight=1.0),
            DifficultyPool(name="easy", threshold=1.0, weight=0.2),
        ),
        min_length=1,
    )
    """The pools, from hard to easy."""
    unseen_weight: float = Field(1.0, gt=0)
    """The weight of an example that was not scored yet."""

    @field_validator("pools")
    @classmethod
    def _rising(cls, pools: tuple[DifficultyPool, ...]) -> tuple[DifficultyPool, ...]:
        thresholds = [pool.threshold for pool in pools]
        if thresholds != sorted(set(thresholds)):
            raise ValueError(f"the thresholds {thresholds} must rise from pool to pool, so that no pool is empty")
        if len({pool.name for pool in pools}) < len(pools):
            raise ValueError(f"the names {[pool.name for pool in pools]} must differ")
        return pools


SamplerConfig = Annotated[StandardSampler | DifficultyPoolsSampler, Field(discriminator="type")]


class ModelConfig(Section):
    path: str = operational("")
    """Directory (or hub id) of the starting weights. Not in keys: the digest of the weights is."""
    tokenizer: str = operational("")
    """Directory (or hub id) of the tokenizer; empty means beside the weights."""
    renderer: str = ""
    """Name of the `renderers` renderer that turns messages into tokens. Empty is the one that the renderers
    package knows for the model's name, or one of the family of its `model_type` that writes the same tokens as its chat
    template; else it is refused, because a silent default has no tool support."""
    renderer_settings: dict[str, Any] = Field({})
    """That renderer's own settings, for example `enable_thinking = false` for qwen3: its prompts then end with an empty
    thought on every turn, so that a conversation of several user turns stays one branch."""
    tokenizer_digest: str = ""
    """Digest of the tokenizer's files, which decide what tokens a conversation becomes; filled in when resolved."""
    vocab_size: int = 0
    """Size of the vocabulary; 0 is filled in from the model when the config is resolved."""


class AssignmentConfig(Section):
    groups_per_step: int = Field(8, ge=1)
    """Examples tried in one step."""
    group_size: int = Field(16, ge=1)
    """Rollouts of each example."""
    shuffle: bool = True
    """Whether examples come in a seeded random order, another one in each epoch; otherwise in dataset order."""
    sampler: SamplerConfig = StandardSampler()
    """Which examples are tried."""
    oversampling: float = Field(1.0, ge=1, le=4)
    """How many times as many groups are started as a step needs. When enough groups of an environment have ended, its
    other groups are stopped, and their rollouts are rows of class `straggler`. Needs the filter `incomplete_group`,
    because the finished rollouts of a stopped group are its short ones. In a stream nothing is stopped for it: groups
    that a step does not need are left to later ones, until they are stale."""
    refill: bool = False
    """Whether groups without a learning signal are replaced by groups of other examples, with the same policy, in up to
    `filtering.max_batch_attempts` batches: dynamic sampling (DAPO, arXiv 2503.14476)."""


class AdmissionConfig(Section):
    """A gate at which a group is refused whose tokens of the rl component have advantages within a range only.

    A group without such tokens is admitted: it teaches by another component.
    """

    reject_min: float = 0.0
    """Lower end of the range, itself included."""
    reject_max: float = 0.0
    """Upper end of the range, itself included."""


class RolloutConfig(SamplingConfig):
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the likeliest tokens whose probabilities add up to this; 1 is all."""
    max_tokens: int = Field(128, ge=1)
    """Most tokens sampled in one model call."""
    max_off_policy_steps: int = operational(0, ge=0)
    """Most steps from the policy that samples a rollout to the one that is trained on it. 0 runs the stages in turn; 1
    samples the next step with the last policy while this step trains. With 2 or more, groups are sampled in one stream
    ahead of the training, and a step takes those that finish first."""
    weight_update: Literal["wait", "keep", "abort"] = later("wait")
    """What becomes of the rollouts of a stream that are under way when a newer policy is there: they are sampled to
    their end before the weights are exchanged (wait), go on with the new weights (keep), or are dropped with their
    groups and sampled again (abort)."""
    recompute_states: bool = later(True)
    """With `weight_update = "keep"`: whether attention states of older weights are computed again with the new ones.
    Kept states save that, and log-probs are then of neither policy."""
    stale: Literal["wait", "drop", "top_up"] = later("wait")
    """What becomes of a group of a stream that is still being sampled when the last step within `max_off_policy_steps`
    of its policy is filled: that step waits for it (wait), or the group is stopped, recorded as stale, and replaced by
    a group of another example (drop) or by one of the same example with other seeds (top_up)."""
    keep_turns: bool = operational(False)
    """Whether turns of rollouts under way are committed as they end. After a crash these rollouts are played again, and
    what the engine has answered is not sampled again where the environment asks the same: for long rollouts of
    deterministic environments."""
    max_in_flight: int = operational(128, ge=1)
    """Most rollouts that run at the same time."""
    max_attempts: int = operational(3, ge=1)
    """Attempts at a rollout that failed for a retryable reason; the last failure is a row."""
    timeout_seconds: float = operational(300.0, gt=0)
    """Longest time for a rollout; then it is cancelled and recorded as a timeout."""


class PackingConfig(Section):
    tokens_per_row: int = Field(2048, ge=2)
    """Token budget of a packed row; no sample may be longer."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps from one batch, one after the other: its samples are split into that many mini-batches."""
    data_parallel: int = Field(1, ge=1)
    """Rows are filled evenly by estimated cost, their number a multiple of this: as many as the ranks that usually
    train them. Other numbers of ranks train them too."""
    zero_advantages: bool = False
    """Whether tokens of the rl component with an advantage of zero are trained. They would only count in the
    denominator, and `kl_tau` would hold them to the engine's log-probs. False leaves them out, as
    `filter_zero_advantages` of prime-rl does."""
    shared_prefixes: bool = later(False)
    """Whether samples of a group that begin with the same prompt are packed into the same rows where that makes the
    batch cheaper, as `training.shared_prefixes` computes it once in each row. Rows stay within `tokens_per_row`."""


class SupervisedDataConfig(Section):
    path: str = operational("")
    """JSONL or Parquet file of prompt and completion, or of messages. Not in keys: the digest of its rows is."""
    runs: tuple[str, ...] = operational(())
    """Runs of the store whose rollouts a run of kind `dpo` learns preferences from: the best and the worst of each
    group that has two different rewards. Not in keys: the digest of the pairs is."""
    max_length: int = Field(512, ge=2)
    """Longest sample in tokens; a longer one is an error row, not a silent cut."""

"""The algorithms of the advantage stage: one section each, distinguished by `type`, with what is known before any row.

What the checks and the pipeline need to know of an algorithm before there is a row is a class variable of its section.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from configs.fields import Section, later, operational, version_of
from configs.services import EngineProcess, ExternalModelConfig


class AlgorithmSection(Section):
    """What every algorithm's section says of it."""

    compares_group: ClassVar[bool] = True
    """Whether it compares the rollouts of a group, so that a single rollout or equal rewards give no learning
    signal."""
    per_agent: ClassVar[bool] = False
    """Whether it keeps agents apart, so that environments of several trainable agents may use it."""
    single_agent: ClassVar[bool] = True
    """Whether environments of one trainable agent may use it."""
    stateful: ClassVar[bool] = False
    """Whether it carries state from step to step, in table `estimator_states`."""
    scored_by: ClassVar[Literal["", "teacher", "policy"]] = ""
    """Who scores the tokens of kept traces before the advantage stage, into table `references`."""
    sampled_by: ClassVar[Literal["policy", "teacher"]] = "policy"
    """Whose tokens its environment's rollouts are."""


class LengthPenalty(Section):
    """Linear length penalty: reward minus the group's pass rate times the weighted lengths, each over its maximum."""

    output: float = Field(0.25, ge=0)
    """Weight of sampled tokens."""
    input: float = Field(0.1, ge=0)
    """Weight of tokens fed in."""
    turns: float = Field(0.1, ge=0)
    """Weight of turns."""
    passing: float = 1.0
    """A rollout passes with at least this reward, up to rounding as in `evaluation.pass_reward`; the share of a group's
    rollouts that pass is its pass rate."""


class Overlong(Section):
    """Soft overlong punishment of DAPO: nothing up to `max_tokens - buffer_tokens`, `penalty` from `max_tokens` on."""

    max_tokens: int = Field(ge=1)
    """Sampled tokens from which on the whole penalty is subtracted from the reward."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before that over which the penalty rises linearly."""
    penalty: float = Field(1.0, ge=0)
    """The whole penalty, in units of reward."""


class GroupSection(AlgorithmSection):
    """What algorithms that compare the rollouts of a group have in common."""

    length_penalty: LengthPenalty | None = None
    """Shorter rollouts are worth more among those that pass; null is off."""
    overlong: Overlong | None = None
    """Rollouts near the limit of tokens are worth less; null is off."""

    @property
    def shaped(self) -> bool:
        """Whether lengths are compared with the rewards, so that equal rewards may teach something."""
        return self.length_penalty is not None or self.overlong is not None


class GrpoConfig(GroupSection):
    type: Literal["grpo"] = "grpo"
    normalise_std: bool = False
    """Whether the advantage is divided by the group's standard deviation (population) plus epsilon."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class DrGrpoConfig(GroupSection):
    type: Literal["dr_grpo"] = "dr_grpo"
    length_normaliser: int = Field(1024, ge=1)
    """Tokens that a rollout counts for in the rl denominator, however long it is; in the paper the budget of tokens."""


class RlooConfig(GroupSection):
    type: Literal["rloo"] = "rloo"


class MaxRlConfig(GroupSection):
    type: Literal["max_rl"] = "max_rl"


class ReinforcePpConfig(GroupSection):
    type: Literal["reinforce_pp"] = "reinforce_pp"
    statistics: Literal["rollouts", "tokens"] = later("rollouts")
    """What mean and standard deviation are computed over: rollouts counts each rollout once; tokens counts it as many
    times as it has sampled tokens, as the paper's code and verl do, so that long rollouts weigh more. With tokens,
    advantages of a group do not add up to zero."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


class HierarchicalGrpoConfig(GroupSection):
    per_agent: ClassVar[bool] = True
    single_agent: ClassVar[bool] = False
    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: tuple[str, ...] = ("solver",)
    """Agents that are compared within one episode, that is on the same proposed problem; others within the group."""


class RaeConfig(AlgorithmSection):
    compares_group: ClassVar[bool] = False
    per_agent: ClassVar[bool] = True
    single_agent: ClassVar[bool] = False
    stateful: ClassVar[bool] = True
    type: Literal["rae"] = "rae"
    decay: float = Field(0.9, ge=0, lt=1)
    """Share of the old baseline in the new one."""
    order: Literal["post", "pre"] = "post"
    """post subtracts the baseline that already has the reward in it, pre the one before."""
    key: Literal["example", "agent"] = later("example")
    """What has its own baseline: example keeps one for each example and agent, and fits few examples that come back
    many times; agent keeps one for each agent over all examples, and fits data with mostly new examples."""


class EchoRole(Section):
    alpha: float = Field(0.1, gt=0)
    """Weight of a token in the cross-entropy component."""
    tool_names: tuple[str, ...] | None = None
    """Only results of these tools; null is every tool. Means nothing for other roles than tool."""


class EchoConfig(GrpoConfig):
    type: Literal["echo"] = "echo"  # type: ignore[assignment]
    system: EchoRole | None = None
    """System messages of later turns; null leaves them out."""
    user: EchoRole | None = None
    """User messages of later turns; null leaves them out."""
    tool: EchoRole | None = EchoRole()
    """Tool results; null leaves them out."""
    keep_mask: str = ""
    """Import path of a function that narrows the choice, `package.module:function`; empty takes every token. It is
    called with the table of messages and `arguments`, and returns a list of booleans, one per token, per message."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments, plain values."""
    keep_mask_version: str = version_of("keep_mask")
    """Name and version of its package, or the digest of its file; filled in when resolved."""
    in_parts: bool = later(False)
    """Whether keep_mask may be called with a part of a large batch at a time, each with whole groups."""


class ChatTeacherConfig(ExternalModelConfig):
    """A teacher that someone else serves with the OpenAI chat API; `rollout.max_in_flight` limits its requests."""

    requests_per_minute: int | None = operational(None, ge=1)
    """Most requests in a minute, repeated ones included, of which each process of the run's environments has an equal
    share; null is no limit."""
    retries: int = operational(8, ge=0)
    """How many times a request is sent again that got no answer, or one of status 408, 409, 429 or 500 and above: after
    half a second, doubling up to 8 s, or when Retry-After says so, if that is within two minutes."""
    answer_seconds: float | None = operational(None, gt=0)
    """Longest silence before a request is sent again; null is no limit but `rollout.timeout_seconds`."""


class FrozenModelConfig(EngineProcess):
    """A model that is never trained: its weights, for which an engine is started, or where others serve it."""

    path: str = operational("")
    """Directory (or hub id) of its weights; an engine is started for it. Not in keys: `version` is."""
    api_key_variable: str = operational("STAGECOACH_TEACHER_KEY")
    """Environment variable that holds the key of an external engine."""
    version: str = ""
    """Digest of its weights, or what an external engine says that it serves; filled in when resolved."""
    max_in_flight: int = operational(64, ge=1)
    """Most sequences that are scored at once."""
    gpu_memory_utilization: float = operational(0.3, gt=0, le=1)
    """Share of a GPU's memory for its engine; those of the policy's engine and the learner come on top."""


class TeacherConfig(FrozenModelConfig):
    """A frozen model that scores or samples: from a directory of weights, or served elsewhere, by `url` or `chat`."""

    chat: ChatTeacherConfig | None = later(None)
    """A chat API that serves it; only for `sft`. The model's renderer turns its replies into tokens."""


class ImitationSection(AlgorithmSection):
    """What algorithms have in common that look at tokens and not at rewards."""

    compares_group: ClassVar[bool] = False
    per_agent: ClassVar[bool] = True


class OpdConfig(ImitationSection):
    scored_by: ClassVar[Literal["", "teacher", "policy"]] = "teacher"
    type: Literal["opd"] = "opd"
    teacher: TeacherConfig = TeacherConfig()
    """The model whose log-probs the policy learns, on its own tokens."""


class OpsdConfig(ImitationSection):
    scored_by: ClassVar[Literal["", "teacher", "policy"]] = "policy"
    type: Literal["opsd"] = "opsd"
    demonstration: str = "answer"
    """Field of the trace's info, or else of the example's task, that holds the demonstration."""
    template: str = "A correct answer, for guidance:\n{demonstration}"
    """The system message that the policy sees before the conversation."""
    max_in_flight: int = operational(64, ge=1)
    """Most sequences that are scored at once."""


class SftConfig(ImitationSection):
    sampled_by: ClassVar[Literal["policy", "teacher"]] = "teacher"
    type: Literal["sft"] = "sft"
    teacher: TeacherConfig = TeacherConfig()
    """The model whose tokens are trained on; it has the policy's tokenizer, unless it is served by a chat API."""


class SupervisedConfig(ImitationSection):
    type: Literal["supervised"] = "supervised"


class PreferencesConfig(AlgorithmSection):
    scored_by: ClassVar[Literal["", "teacher", "policy"]] = "teacher"
    type: Literal["preferences"] = "preferences"
    teacher: TeacherConfig = TeacherConfig()
    """The reference policy; of a run of kind `dpo` by default the weights that it starts from."""


class CustomConfig(AlgorithmSection):
    type: Literal["custom"] = "custom"
    function: str = Field(min_length=1)
    """Import path, `package.module:function`, looked for where Python looks and in the current working directory. It is
    called with an environment's kept traces (`GroupedTraces`) and this section; returns a Credit."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More settings for the function, plain values; it reads them from this section."""
    from_groups: bool = True
    """Whether it compares the rollouts of a group, so that a single rollout or equal rewards give no learning
    signal."""
    keeps_state: bool = False
    """Whether it keeps state from step to step: its Credit has `states`, rows of table `estimator_states` for the
    environment. At the next step it gets them in `states` of its input."""
    version: str = version_of("function")
    """Name and version of its package, or the digest of its file; filled in when resolved."""
    in_parts: bool = later(False)
    """Whether it may be called with a part of a large batch at a time, each with whole groups; state goes from part to
    part. Otherwise all messages of the batch are held in memory."""

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """What the section says of its function."""
        return self.keeps_state

    @property
    def compares_group(self) -> bool:  # type: ignore[override]
        """What the section says of its function."""
        return self.from_groups


AlgorithmConfig = Annotated[
    GrpoConfig
    | DrGrpoConfig
    | RlooConfig
    | MaxRlConfig
    | ReinforcePpConfig
    | HierarchicalGrpoConfig
    | RaeConfig
    | EchoConfig
    | OpdConfig
    | OpsdConfig
    | SftConfig
    | SupervisedConfig
    | PreferencesConfig
    | CustomConfig,
    Field(discriminator="type"),
]


def teacher_of(algorithm: AlgorithmConfig) -> TeacherConfig | None:
    """Return the teacher of an algorithm; None where it has none."""
    teacher: TeacherConfig | None = getattr(algorithm, "teacher", None)
    return teacher

"""Environments: what a run's rollouts are made in, who plays the seats there, and how they are served."""

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.algorithms import AlgorithmConfig, TeacherConfig
from configs.fields import Section, elsewhere, later, operational
from configs.sampling import SamplingConfig


class StaticPool(Section):
    type: Literal["static"] = "static"
    num_workers: int = operational(1, ge=1)
    """Worker processes started at once; 1 is a single process."""


class ElasticPool(Section):
    type: Literal["elastic"] = "elastic"
    max_workers: int | None = operational(None, ge=1)
    """Most worker processes; null grows without bound."""
    multiplex: int = operational(128, ge=1)
    """Rollouts per worker before another is started."""


POLICY = "policy"
"""The name that bindings have for the policy."""


class PlayerConfig(TeacherConfig):
    """A model that plays a seat in place of the policy and is never trained on: a frozen one, or an earlier policy."""

    base: bool = later(False)
    """Whether it is the weights below the adapters (`training.lora`), which the policy's engine serves as well."""
    earlier: int | None = later(None, ge=1)
    """Steps by which it is older than the adapter that is sampled, on the same engine; at first it is the base."""

    @property
    def beside(self) -> str:
        """The name of a model that the policy's engine serves; empty for one with an engine of its own."""
        return "base" if self.base else f"policy-{self.earlier}" if self.earlier else ""


class BindingConfig(Section):
    """A function that names, for each episode, the models that play its seats."""

    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """Import path, `module:function`, called with the episode (`stagecoach.EpisodeInfo`). It returns names of models by
    seat: `policy`, or one of `models`. A seat that it leaves out is played as its section says."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    models: dict[str, PlayerConfig] = Field({})
    """Models by name, as in `seats.NAME.model`."""


PoolConfig = Annotated[StaticPool | ElasticPool, Field(discriminator="type")]


class SeatConfig(SamplingConfig):
    """One agent's seat in an environment: what differs there from the environment's own settings.

    How the seat is sampled holds in evaluations too."""

    harness: dict[str, Any] = Field(default_factory=dict)
    """The seat's harness; empty takes the environment's."""
    runtime: dict[str, Any] = Field(default_factory=dict)
    """The seat's runtime; empty takes the environment's."""
    max_turns: int | None = Field(None, ge=1)
    """Most model turns of this seat in one rollout; null takes the environment's."""
    trainable: bool = True
    """Whether the seat's rollouts are trained on, where the environment says that they may be."""
    model: PlayerConfig | None = None
    """A frozen model that plays the seat in place of the policy, by path or URL, or the base of the run's adapters: an
    opponent, a user, a judge. Never trained on. Null is the policy."""


class SeatRule(Section):
    """Which of an environment's trainable seats are trained."""

    drop_judge: bool = True
    """Not the agent called `judge`: its reward is zero by construction, training on it is noise."""
    learner_seat: bool = False
    """Only the agent that the trace's info names under `learner_seat`."""


class GroupRewardConfig(Section):
    """A function that scores all rollouts of a group together, beside the rewards that each has by itself."""

    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """Import path, `module:function`, called with the list of the group's rollouts (`stagecoach.GroupRollout`). It
    returns, or awaits, for each rollout a number or a dictionary of numbers by the name of the part."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of the numbers in the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    partial: bool = False
    """Whether the function scores the others of a group that lost a rollout; else all of them end as errors."""
    timeout_seconds: int = Field(300, ge=1, le=600)
    """Longest time for one group."""


class EnvironmentConfig(SamplingConfig):
    name: str
    """The environment's name in this run; the tables carry it."""
    taskset: dict[str, Any]
    """The verifiers taskset: its `id` (an installed package) and its own settings."""
    env: dict[str, Any] = Field({})
    """How one task becomes one episode, if not in the taskset's own way: the `id` of a verifiers environment
    (`best-of-n`, `user-sim`) and its own settings, or only settings for the environment that the taskset brings."""
    seats: dict[str, SeatConfig] = Field({})
    """Settings of single seats, by the agent's name."""
    drop_judge: bool = elsewhere(True)
    """Whether the agent called `judge` is left out of training: its reward is zero by construction."""
    learner_seat: bool = elsewhere(False)
    """Whether only one agent is trained: the one that a trace's info names under `learner_seat`. A trace without that
    field stops the stage."""
    harness: dict[str, Any] = Field(default_factory=lambda: {"id": "chat_loop"})
    """The verifiers harness: its `id` and its own settings."""
    runtime: dict[str, Any] = Field(default_factory=lambda: {"type": "subprocess"})
    """The verifiers runtime: its `type` and its own settings."""
    max_turns: int | None = Field(None, ge=1)
    """Most model turns in one rollout; null is no limit."""
    algorithm: AlgorithmConfig | None = elsewhere(None)
    """How this environment's rollouts are credited; null takes the run's algorithm."""
    weight: float = Field(1.0, gt=0)
    """Share of a step's groups, relative to the other environments' weights."""
    holdout_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of examples held out for evaluation, by hash of their content: stable when the dataset grows."""
    holdout_seed: int = 0
    """Another seed gives another split."""
    evaluation_seat: str = operational("")
    """The only agent whose rollouts an evaluation counts, so that policies can be compared; empty counts every trained
    agent.
    """
    max_examples: int = Field(100_000, ge=1)
    """Most examples read from the taskset; an endless one is cut here."""
    max_prompt_tokens: int | None = later(None, ge=1)
    """Most tokens of an example's first prompt, as the model's renderer writes it without schemas of tools; null is no
    limit. What later turns add is not known beforehand."""
    long_prompts: Literal["drop", "error"] = later("drop")
    """Whether examples whose first prompt has more tokens than `max_prompt_tokens` are left out, from training and
    evaluation, or stop the run before anything starts."""
    group_rewards: dict[str, GroupRewardConfig] = later({})
    """Rewards that see a whole group, by the name that they have among a rollout's rewards."""
    bindings: BindingConfig | None = later(None)
    """Which models play which seats, episode by episode; null leaves every seat to its section."""
    version: str = ""
    """Version of the environment's package; filled in when the config is resolved."""
    address: str = operational("")
    """Address of an environment server that someone else runs (tcp://host:port), or of several, with commas between;
    empty starts them here."""
    servers: int = operational(1, ge=1)
    """Servers of this environment, side by side. A rollout goes to the one that has fewest. One that is lost is started
    again, and its rollouts in flight are sampled by the others; `max_restarts` holds for each."""
    pool: PoolConfig = operational(StaticPool())
    """Worker processes of the environment server."""
    variables: tuple[str, ...] = operational(())
    """Names of environment variables with secrets for the code of the environment. Its server and its grader get these,
    and those that other settings of this section name, and no other secrets."""
    sandbox_labels: tuple[str, ...] = operational(())
    """Labels of every sandbox that the server makes, beside those of the runtime's own settings, where the runtime has
    labels (`prime`): to find all that a run left running."""
    startup_seconds: float = operational(180.0, gt=0)
    """Longest wait until the server takes requests, because it loads the environment first. It is added to
    hang_seconds."""
    hang_seconds: float = operational(120.0, gt=0)
    """A server that does not answer a health request for this time hangs, and is restarted. It must be longer than the
    longest step of the environment that blocks the event loop, for example a reward that is computed without
    `await`."""
    max_restarts: int = operational(20, ge=0)
    """Restarts of the server in one run, after it died or hung, before the run fails. A single example that always
    kills the server costs up to six restarts before its rollouts fail."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the servers that others run; none where all are started here."""
        return tuple(each.strip() for each in self.address.split(",") if each.strip())

    @property
    def server_names(self) -> tuple[str, ...]:
        """The names of the environment's servers: its own, and for further ones a number after that."""
        count = len(self.addresses) or self.servers
        return (self.name, *(f"{self.name}-{number}" for number in range(2, count + 1)))

    def num_processes(self, max_in_flight: int) -> int:
        """Return how many processes play so many rollouts at most: the workers of all servers."""
        pool = self.pool
        if isinstance(pool, StaticPool):
            return self.servers * pool.num_workers
        # verifiers adds a worker when nine tenths of the others' room is taken.
        return self.servers * (pool.max_workers or 1 + int(max_in_flight / (0.9 * pool.multiplex)))

    @property
    def players(self) -> dict[str, PlayerConfig]:
        """The models that play seats in place of the policy, by their dotted keys within the environment."""
        own = {f"seats.{name}.model": seat.model for name, seat in self.seats.items() if seat.model}
        named = self.bindings.models if self.bindings else {}
        return own | {f"bindings.models.{name}": model for name, model in named.items()}

    @property
    def seat_rule(self) -> SeatRule:
        """Which of the trainable seats are trained."""
        return SeatRule(drop_judge=self.drop_judge, learner_seat=self.learner_seat)

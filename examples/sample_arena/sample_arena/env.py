"""The environment: a schedule played over verifiers interactions, each member in a rollout of its own."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Generic, TypeVar

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.agent import Interaction
from verifiers.v1.configs.agent import agent_config_fields

from sample_arena import seats
from sample_arena.channels import Channels, Utterance
from sample_arena.errors import PlayError
from sample_arena.folding import fold
from sample_arena.kernel import State, failed
from sample_arena.play import Play
from sample_arena.prompts import PromptPack
from sample_arena.schedule import Program, Slot, require_same
from sample_arena.scores import JUDGE, EpisodeScore, complete, errored, record
from sample_arena.seeds import shift_seed


class ArenaConfig(vf.EnvConfig):
    """What all arenas can be told; a subclass declares a seat for each member, in their order."""

    max_concurrent_agents: int | None = Field(None, ge=1)
    """Members that generate at the same time; null lets all of a simultaneous slot."""
    learner_seat: str = ""
    """The member that each trace's info names as the one that learns: a name pins it, `alternate` draws it by example,
    empty writes nothing."""
    private_tag: str | None = None
    """The tag around what a member notes for itself; null has no such channel."""


ConfigT = TypeVar("ConfigT", bound=ArenaConfig)


class ArenaEnv(vf.Env[ConfigT], Generic[ConfigT]):
    """Plays an arena: a subclass says who is in it, who speaks when, what they are told and what it was worth.

    Raises ArenaError when it is made of parts that do not fit together.
    """

    def __init__(self, config: ConfigT) -> None:
        super().__init__(config)
        self._program = self.program()
        self._prompts = self.prompts()
        self._channels = Channels(config.private_tag)
        self._rivals = tuple(member for member in self.members if member != JUDGE)
        require_same(self.members, tuple(agent_config_fields(config)), self._program)
        self._prompts.require_complete(self.members, self._program)
        seats.require_learner(config.learner_seat, self._rivals)

    @property
    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """Everyone who plays, in the order of the config's seats."""

    @abstractmethod
    def program(self) -> Program:
        """Return who speaks when."""

    @abstractmethod
    def prompts(self) -> PromptPack:
        """Return what members are told."""

    @abstractmethod
    def score(self, task: vf.Task, state: State) -> EpisodeScore | Mapping[str, Any]:
        """Return what an episode was worth to every member; it went to its end, or a prompt grew too long."""

    def values(self, task: vf.Task, member: str) -> Mapping[str, object]:
        """Return what the templates may say of the task to this member."""
        return {}

    def partial_score(self, task: vf.Task, state: State) -> EpisodeScore | Mapping[str, Any] | None:
        """Return what of a failed episode stands: members it does not score are not scored, rather than given zero."""
        return None

    async def committed(self, task: vf.Task, state: State) -> None:
        """Follow the state after a slot; a PlayError raised here fails the episode, which stays as before the slot."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one episode and score it; a failed one too, as far as it was."""
        seats.require_text(task.data)
        for number, member in enumerate(self.members):  # with one seed for all they would draw alike
            shift_seed(getattr(agents, member), number)
        seat = seats.learner(self.config.learner_seat, self._rivals, task.key)
        talks: dict[str, Interaction] = {}
        play = Play(
            self.members,
            self._program,
            lambda state, slot, member: self._speak(task, talks[member], state, slot, member),
            lambda state: self.committed(task, state),
        )
        try:
            async with AsyncExitStack() as stack:
                for member in self.members:
                    own = seats.seated(task, self._system(task, member))
                    talks[member] = await stack.enter_async_context(getattr(agents, member).interaction(own))
                    seats.noted({member: talks[member].trace}, seat)
                state = await play.finish()
        except PlayError as error:  # recorded on every open trace as it came through their contexts
            state = failed(play.state, f"{type(error).__name__}: {error}")
        traces = {member: talk.trace for member, talk in talks.items()}
        seats.noted(traces, seat, state.stop)
        self._record(task, state, list(traces.values()))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Put failed traces first, so that what is tried again is the failure and not what followed from it."""
        order = {member: number for number, member in enumerate(self.members)}
        episode.traces.sort(key=lambda trace: (trace.ok, order[trace.agent.name]))

    def _record(self, task: vf.Task, state: State, traces: list[vf.Trace]) -> None:
        if state.stop == "error":
            score = errored(str(state.error), self.members, self.partial_score(task, state))
        else:
            score = complete(self.score(task, state), self.members)
        total = {"total_turns": float(sum(trace.num_turns for trace in traces))}
        record(score.model_copy(update={"metrics": {**total, **score.metrics}}), traces)

    async def _speak(self, task: vf.Task, talk: Interaction, state: State, slot: Slot, member: str) -> Utterance:
        segment = await talk.turn(self._reading(task, state, member))
        if segment.terminated:
            raise seats.unfinished(member, talk.trace)
        utterance = self._channels.utterance(member, slot.phase, seats.reply_of(segment))
        if utterance.parse_error:
            seats.flag_unreadable(talk.trace)
        return utterance

    def _system(self, task: vf.Task, member: str) -> str | None:
        template = self._prompts.system.get(member)
        return None if template is None else self._prompts.rendered(template, self.values(task, member))

    def _reading(self, task: vf.Task, state: State, member: str) -> vf.Messages:
        texts = self._prompts.reading(self._program, state, member, self.values(task, member))
        return fold([vf.UserMessage(content=text) for text in texts if text] or [vf.UserMessage(content="")])

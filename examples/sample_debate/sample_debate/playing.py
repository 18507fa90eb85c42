"""One episode: statements by turns or at once, then the judge's verdict; what one wins the other loses."""

from collections.abc import Mapping
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field
from sample_arena.env import ArenaConfig, ArenaEnv
from sample_arena.kernel import State
from sample_arena.prompts import PromptPack
from sample_arena.schedule import Schedule
from sample_arena.scores import JUDGE, EpisodeScore, MemberScore, zero_sum_reward

from sample_debate.claims import num_true_citations
from sample_debate.rules import MEMBERS, PROMPTS, VERDICTS, program, shown


class DebateEnvConfig(ArenaConfig):
    """Two debaters and a judge."""

    affirmative: vf.AgentConfig = vf.AgentConfig()
    """Says that the digit is in the list."""
    negative: vf.AgentConfig = vf.AgentConfig()
    """Says that it is not."""
    judge: vf.AgentConfig = vf.AgentConfig()
    """Reads the claim and what was said in public, not the list, and names the winner."""
    num_rounds: int = Field(1, ge=1)
    """How often each debater speaks."""
    schedule: Literal["sequential", "simultaneous"] = "sequential"
    """One after the other, or both at once: then neither hears the other before the next round."""


class DebateEnv(ArenaEnv[DebateEnvConfig], vf.Env[DebateEnvConfig]):
    """Plays a debate."""

    @property
    def members(self) -> tuple[str, ...]:
        """The two debaters and the judge."""
        return MEMBERS

    def program(self) -> Schedule:
        """Return the rounds of statements, and the verdict."""
        return program(self.config.num_rounds, at_once=self.config.schedule == "simultaneous")

    def prompts(self) -> PromptPack:
        """Return what members are told."""
        return PROMPTS

    def values(self, task: vf.Task, member: str) -> Mapping[str, object]:
        """Return the claim, and to debaters the list."""
        return shown(task.data, member)

    def score(self, task: vf.Task, state: State) -> EpisodeScore:
        """Return +1 for whom the judge names, -1 for the other, 0 for the judge; a verdict that names nobody is a tie.

        Metrics: whether the verdict is true and whether there is one, and each debater's share of statements that cite
        the list as it is.
        """
        verdict = state.of(JUDGE)
        winner = VERDICTS.winner(verdict[-1].public) if verdict else None
        rewards = zero_sum_reward(MEMBERS, winner)
        metrics = {"verdict_given": float(winner is not None), "verdict_true": float(winner == task.data.truth)}
        members = [
            MemberScore(member=member, reward=rewards[member], metrics=self._metrics(task, state, member))
            for member in MEMBERS
        ]
        return EpisodeScore(members=tuple(members), metrics=metrics)

    def _metrics(self, task: vf.Task, state: State, member: str) -> dict[str, float]:
        said = [each.public for each in state.of(member)]
        if member == JUDGE or not said:
            return {}
        return {"cited": num_true_citations(said, task.data.numbers) / len(said)}

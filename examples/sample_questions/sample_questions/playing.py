"""Three ways to play a question: one seat answers it, two debate it, or one consultant explains it, before a judge."""

import re
from collections.abc import Mapping
from typing import TypeVar

import verifiers.v1 as vf
from sample_arena.env import ArenaConfig, ArenaEnv
from sample_arena.kernel import State
from sample_arena.prompts import PromptPack
from sample_arena.schedule import Schedule, Slot
from sample_arena.scores import JUDGE, EpisodeScore, of_rewards, zero_sum_reward

ANSWER = re.compile("<([A-D])>")
ARGUE, DECIDE = "argue", "decide"
"""The phases: what is said for a claim, and the letter that ends an episode."""


class AnswerConfig(ArenaConfig):
    """One seat."""

    answerer: vf.AgentConfig = vf.AgentConfig()
    """Reads the passage and the question, and names a letter."""


class DebateConfig(ArenaConfig):
    """Two debaters and a judge."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    """Reads the question and what was said, not the passage, and names a letter."""


class ConsultancyConfig(ArenaConfig):
    """A consultant, who may have to claim a wrong option, and a judge."""

    consultant: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    """As in a debate."""


ConfigT = TypeVar("ConfigT", bound=ArenaConfig)


class QuestionEnv(ArenaEnv[ConfigT]):
    """Plays a question: all but the last member argue for their claims at once, the last names a letter."""

    def program(self) -> Schedule:
        """Return the statements, if there are any, and the answer."""
        *arguing, deciding = self.members
        return Schedule((*([Slot(ARGUE, tuple(arguing))] if arguing else []), Slot(DECIDE, (deciding,))))

    def prompts(self) -> PromptPack:
        """Return what members are told; the judge alone does not read the passage."""
        *arguing, deciding = self.members
        question = "{{ question }} {{ options }}"
        opening = {member: f"{{{{ passage }}}} {question} claim {{{{ claim }}}}" for member in arguing}
        opening[deciding] = question if deciding == JUDGE else f"{{{{ passage }}}} {question}"
        turns = {(member, ARGUE): ARGUE for member in arguing} | {(deciding, DECIDE): DECIDE}
        names = frozenset({"passage", "question", "options", "claim"})
        return PromptPack(turns, question=opening, names=names)

    def values(self, task: vf.Task, member: str) -> Mapping[str, object]:
        """Return the question, and for all but the judge the passage and the claim."""
        shown = {"question": task.data.question, "options": task.data.options}
        claim = task.data.claims[self.members[:2].index(member)] if member != JUDGE else ""
        return shown if member == JUDGE else {**shown, "passage": task.data.passage, "claim": claim}

    def score(self, task: vf.Task, state: State) -> EpisodeScore:
        """Return 1 for who convinced the judge of the claim, or gave the right answer; -1 for who lost a debate."""
        said = state.of(self.members[-1])
        letter = named(said[-1].public) if said else None
        right, rewards = float(letter == task.data.answer), dict.fromkeys(self.members, 0.0)
        claimed = dict(zip(task.data.claims, self.members[:-1], strict=False))
        if len(self.members) > 2:
            rewards = zero_sum_reward(self.members, claimed.get(letter or ""))
        elif letter in claimed or len(self.members) == 1:
            rewards[self.members[0]] = 1.0 if letter in claimed else right
        return of_rewards(rewards, {"answered": float(letter is not None), "right": right})


class AnswerEnv(QuestionEnv[AnswerConfig], vf.Env[AnswerConfig]):
    """Reinforcement learning from the right answer."""

    members = ("answerer",)


class DebateEnv(QuestionEnv[DebateConfig], vf.Env[DebateConfig]):
    """A debate: what one wins the other loses."""

    members = ("first", "second", JUDGE)


class ConsultancyEnv(QuestionEnv[ConsultancyConfig], vf.Env[ConsultancyConfig]):
    """A consultancy: nobody speaks for the other options."""

    members = ("consultant", JUDGE)


def named(reply: str) -> str | None:
    """Return the letter that a reply names; None where it names none, or several."""
    letters = set(ANSWER.findall(reply))
    return letters.pop() if len(letters) == 1 else None

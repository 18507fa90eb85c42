"""Scores: what an episode of several members was worth to each of them, whole or not at all."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sample_arena.errors import ScoreError

if TYPE_CHECKING:
    from verifiers.v1.trace import Trace

REWARD = "outcome"
"""The name under which a member's reward is written."""
JUDGE = "judge"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return value


Number = Annotated[float, AfterValidator(_finite)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


class MemberScore(_Part):
    """What an episode was worth to one member."""

    member: str = Field(min_length=1)
    reward: Number | None = None
    """None is not scored, which is not a reward of zero."""
    metrics: dict[str, Number] = {}
    """Numbers of this member alone."""


class EpisodeScore(_Part):
    """What an episode was worth to each of its members, and what is true of it as a whole."""

    members: tuple[MemberScore, ...] = ()
    metrics: dict[str, Number] = {}
    """Numbers of the episode; each member's trace carries them."""
    error: str | None = None
    """Why the episode failed; None where it did not."""

    @model_validator(mode="after")
    def _distinct(self) -> "EpisodeScore":
        names = [each.member for each in self.members]
        if len(set(names)) != len(names):
            raise ValueError(f"members {names}: each is scored once")
        for each in self.members:
            if both := sorted(set(each.metrics) & set(self.metrics)):
                raise ValueError(f"metric {both[0]!r} is one of the episode and one of member {each.member!r}")
        return self

    @property
    def rewards(self) -> dict[str, float | None]:
        """The reward of each member."""
        return {each.member: each.reward for each in self.members}


def of_rewards(rewards: Mapping[str, float], metrics: Mapping[str, float] | None = None) -> EpisodeScore:
    """Return the score of an episode with these rewards by member, and these metrics of the whole."""
    members = [{"member": member, "reward": reward} for member, reward in rewards.items()]
    return _validated({"members": members, "metrics": dict(metrics or {})})


def complete(value: Any, members: Sequence[str]) -> EpisodeScore:
    """Return a score, given as such, as a mapping or as an object with its attributes, with members in their order.

    Raises ScoreError unless it rewards exactly `members`: a member left out would pass for one that earned nothing.
    """
    score = _validated(value)
    by_member = {each.member: each for each in score.members}
    missing = [member for member in members if by_member.get(member) is None or by_member[member].reward is None]
    strange = sorted(set(by_member) - set(members))
    if missing or strange:
        raise ScoreError(
            f"score of an episode: no reward for {missing}, and {strange} are not its members {list(members)}. Nothing "
            "of it was written. Give every member a reward, 0 where it earned nothing"
        )
    return score.model_copy(update={"members": tuple(by_member[member] for member in members)})


def errored(error: str, members: Sequence[str], partial: Any = None) -> EpisodeScore:
    """Return the score of an episode that failed: what `partial` has, and no reward for whom it does not score.

    Raises ScoreError where `partial` scores someone who is not of `members`.
    """
    score = EpisodeScore() if partial is None else _validated(partial)
    by_member = {each.member: each for each in score.members}
    if strange := sorted(set(by_member) - set(members)):
        raise ScoreError(f"partial score of an episode: {strange} are not its members {list(members)}")
    filled = tuple(by_member.get(member) or MemberScore(member=member) for member in members)
    return score.model_copy(update={"members": filled, "error": score.error or error})


def zero_sum_reward(members: Sequence[str], winner: str | None) -> dict[str, float]:
    """Return +1 for the winner, -1 for who lost and 0 for a judge; 0 for all where `winner` is None, a tie.

    Raises ScoreError where the winner did not compete, and where it does not compete with exactly one other.
    """
    rivals = [member for member in members if member != JUDGE]
    if len(rivals) != 2 or len(set(members)) != len(members):
        raise ScoreError(f"members {list(members)}: a reward of sum zero is for two rivals, and here are {rivals}")
    if winner is not None and winner not in rivals:
        raise ScoreError(f"winner {winner!r} is none of the rivals {rivals}")
    if winner is None:
        return dict.fromkeys(members, 0.0)
    return {member: 0.0 if member == JUDGE else 1.0 if member == winner else -1.0 for member in members}


def record(score: EpisodeScore, traces: "Sequence[Trace]") -> None:
    """Write a score onto the traces of an episode, each by the agent that made it: all of it or nothing.

    Raises ScoreError where a trace is no member's, a rewarded member has no trace, or a trace is rewarded already, by
    its task: a sum of two scores is neither of them.
    """
    _require_fit(score, traces)
    by_member = {each.member: each for each in score.members}
    for trace in traces:
        own = by_member[trace.agent.name]
        if own.reward is not None:
            trace.record_reward(REWARD, own.reward)
        else:
            trace.rewards[REWARD] = None  # not scored, which is recorded and no zero
        trace.record_metrics({**score.metrics, **own.metrics})
        if score.error is not None:
            trace.info["episode_error"] = score.error


def _require_fit(score: EpisodeScore, traces: "Sequence[Trace]") -> None:
    played = [trace.agent.name for trace in traces]
    if strange := sorted(set(played) - set(score.rewards)):
        raise ScoreError(f"traces of {strange}: the score has members {list(score.rewards)} alone; nothing was written")
    unseen = [member for member, reward in score.rewards.items() if reward is not None and member not in played]
    if unseen:
        raise ScoreError(f"members {unseen} are rewarded and played no part: they have no trace; nothing was written")
    for trace in traces:
        if given := sorted(name for name, reward in trace.rewards.items() if reward is not None):
            raise ScoreError(
                f"trace of {trace.agent.name!r}: its task rewarded it already ({', '.join(given)}), and a sum of two "
                "scores is neither of them; nothing was written. Let the task have metrics and the episode the rewards"
            )


def _validated(value: Any) -> EpisodeScore:
    try:
        return EpisodeScore.model_validate(value)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ScoreError(f"score of an episode: {told}. Nothing of it was written") from error

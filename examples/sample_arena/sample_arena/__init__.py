"""A kernel for verifiers environments of several agents: schedules, channels, prompts, scores."""

from sample_arena.errors import ArenaError, ProtocolError, ScoreError
from sample_arena.scores import EpisodeScore, MemberScore, complete, errored, of_rewards, record, zero_sum_reward

__all__ = [
    "ArenaError",
    "EpisodeScore",
    "MemberScore",
    "ProtocolError",
    "ScoreError",
    "complete",
    "errored",
    "of_rewards",
    "record",
    "zero_sum_reward",
]

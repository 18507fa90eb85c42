"""A verifiers environment of two seats: Kuhn poker, zero-sum, for self-play."""

from sample_kuhn_poker.game import KuhnPokerEnv
from sample_kuhn_poker.taskset import KuhnPokerTaskset

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]

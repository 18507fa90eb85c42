"""A verifiers environment of two seats: Kuhn poker, zero-sum, for self-play."""

from kuhn_poker.game import KuhnPokerEnv
from kuhn_poker.taskset import KuhnPokerTaskset

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]

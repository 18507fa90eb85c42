"""A verifiers taskset: two debaters argue over a claim that can be checked, before a judge."""

from debate.playing import DebateEnv
from debate.taskset import DebateTaskset

__all__ = ["DebateEnv", "DebateTaskset"]

"""A verifiers taskset: two debaters argue over a claim that can be checked, before a judge."""

from sample_debate.playing import DebateEnv
from sample_debate.taskset import DebateTaskset

__all__ = ["DebateEnv", "DebateTaskset"]

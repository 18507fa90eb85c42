"""The questions of `sample_questions`, debated by two seats before a judge who does not see the passage."""

from sample_questions.playing import DebateEnv

__all__ = ["DebateEnv"]

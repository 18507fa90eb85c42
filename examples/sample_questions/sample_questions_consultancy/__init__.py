"""The questions of `sample_questions`, explained by a consultant to a judge who does not see the passage."""

from sample_questions.playing import ConsultancyEnv

__all__ = ["ConsultancyEnv"]

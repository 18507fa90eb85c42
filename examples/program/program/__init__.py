"""A verifiers harness that runs any agent program which speaks the OpenAI API."""

from program.harness import ProgramHarness, reported_reward

__all__ = ["ProgramHarness", "reported_reward"]

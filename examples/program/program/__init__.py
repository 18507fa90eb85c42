"""A verifiers harness that runs any agent program which speaks the OpenAI API."""

from program.harness import ProgramHarness, told

__all__ = ["ProgramHarness", "told"]

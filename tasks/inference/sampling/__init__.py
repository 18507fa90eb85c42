"""Sampling: rollouts through environment servers and the engine."""

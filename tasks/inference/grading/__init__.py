"""Grading: recorded traces scored again by an environment's reward functions."""

"""Metrics: the numbers of a step, and the account of its rollouts."""

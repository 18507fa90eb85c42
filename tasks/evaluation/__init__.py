"""Evaluation: what a policy earns on held-out examples, with intervals."""

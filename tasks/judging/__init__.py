"""Judging: models score rollouts that are recorded, and each of their answers is a row."""

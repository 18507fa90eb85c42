"""Filtering: what is wrong with a trace, and whether it is kept for training."""

"""Packing: samples into rows of a token budget, for each rank and micro-step."""

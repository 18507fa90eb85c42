"""Rollouts that turned out to be unfit: marking them, and who used them."""

"""Rollouts, demonstrations and weights of other programs, in and out."""

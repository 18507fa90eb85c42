"""Replays: recorded steps again, from a stage on, with other settings."""

"""Configs of other trainers in the words of ours: a table of keys for each trainer, and the code that applies it."""

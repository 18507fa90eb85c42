"""Assignment: which examples a step tries, in which groups, with which seeds."""

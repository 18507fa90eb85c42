"""Training: one policy version to the next, through the learner."""

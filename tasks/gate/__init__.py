"""Gate: whether a step's batch goes on to training, by a rule or by a person."""

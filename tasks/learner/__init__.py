"""The learner: one process that turns packed rows into the next policy, and the client that talks to it."""

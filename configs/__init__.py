"""What can be chosen: one frozen model per stage and service, a docstring per field, unknown keys refused."""

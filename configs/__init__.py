"""The config of a run: one frozen model per stage and service, a docstring per field, unknown keys refused."""

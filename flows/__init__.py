"""In which order: the Prefect flows, the services that live as long as a run, and the command line."""

PACKAGES = ("configs", "storage", "tasks", "flows", "stagecoach", "own_data")
"""Our packages, in a checkout and in the wheel: errors of theirs are meant for people."""

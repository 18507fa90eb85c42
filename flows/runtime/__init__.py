"""Runs at work: resolve_run makes a config, open_run a session, loop and pipeline its steps, executor their results."""

"""Prefect: its API and server, deployments, and what a person or a clock does to a run there."""

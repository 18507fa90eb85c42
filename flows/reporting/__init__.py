"""What is reported while a run goes on: panel, artifacts, W&B."""

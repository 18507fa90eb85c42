"""A verifiers taskset for data of your own: local files, or a dataset of the hub."""

from own_data.taskset import OwnDataTaskset

__all__ = ["OwnDataTaskset"]

"""A verifiers taskset for data of your own: a JSONL or Parquet file, or a dataset of the hub."""

from own_data.taskset import OwnDataTaskset

__all__ = ["OwnDataTaskset"]

"""Directories of weights, each complete or absent, local or in an object store."""

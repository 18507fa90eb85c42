"""The store that is meant where none is named; apart from all sections, for commands that read no config."""

import os


def default_store() -> str:
    """Return what STAGECOACH_STORE names, else `stagecoach-store` in the working directory."""
    return os.environ.get("STAGECOACH_STORE") or "stagecoach-store"


def is_object_store(store: str) -> bool:
    """Tell whether a store is one that other machines reach without a file system; anything else is a directory."""
    return "://" in store

"""Policies that are adapters: they lie over the weights of another policy, which must stay as long as they do."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.store import Store

BASE_FILE = "base.json"
"""File of a policy that is an adapter: `policy_key` and `weights_sha256` of the policy it is laid over."""


def base_in(directory: Path) -> str | None:
    """Return the key of the policy that the adapter in `directory` is laid over; None for weights that are whole."""
    file = directory / BASE_FILE
    return str(json.loads(file.read_text())["policy_key"]) if file.is_file() else None


def bases(store: "Store", policy_keys: Iterable[str]) -> set[str]:
    """Return the keys of the policies below those that are adapters; of removed weights nothing is known any more."""
    found = set()
    for key in policy_keys:
        policy = store.policies.find(key)
        file = next((file for file in policy.files if file.path == BASE_FILE), None) if policy else None
        if policy is not None and file is not None:
            found.add(str(json.loads(store.root.read(policy.place_of(file)))["policy_key"]))
    return found

"""A writer in a process of its own, for tests that race or kill it: `python -m tests.storage.writer ROOT WHAT ...`.

Every line it prints, flushed, is an acknowledgement.
"""

import sys
from pathlib import Path

from storage.store import Store, open_store
from tests.storage.rows import entry, messages


def main() -> None:
    root, what, *rest = sys.argv[1:]
    store = open_store(root)
    {"steps": steps, "race": race, "policies": policies, "read": read, "rows": rows}[what](store, *rest)


def steps(store: Store, attempt: str) -> None:
    """Commit step after step, going on where the ledger ends, until killed."""
    step = 0
    while True:
        key = f"step-{step}"
        if store.ledger.find(key) is None:
            rows = messages(count=2 + step % 3)
            outputs = [store.append("messages", rows, run="run", step=step, key=key, attempt=f"{attempt}-{step}")]
            store.ledger.commit(entry(key, outputs=tuple(outputs), step=step, attempt=f"{attempt}-{step}"))
            print(step, flush=True)
        step += 1


def race(store: Store, attempt: str, count: str) -> None:
    """Commit rows for the same keys as everybody else, once told to go; print whose row stands."""
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(count)):
        print(store.ledger.commit(entry(f"key-{number}", attempt=attempt)).attempt, flush=True)


def rows(store: Store, run: str, count: str) -> None:
    """Commit rows of a run of its own, once told to go."""
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(count)):
        store.ledger.commit(entry(f"{run}-{number}", run=run))
        print(number, flush=True)


def policies(store: Store, attempt: str) -> None:
    """Publish policy after policy until killed."""
    number = 0
    while True:
        if store.policies.find(f"policy-{number}") is None:
            scratch = store.policies.scratch(f"policy-{number}")
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                Path(scratch, name).write_bytes(name.encode() * 20_000)
            store.policies.publish(scratch, f"policy-{number}")
            print(number, flush=True)
        number += 1


def read(store: Store) -> None:
    """Read everything in every way there is."""
    for found in store.ledger.entries():
        for piece in found.outputs:
            print(store.read([piece]).num_rows, flush=True)
    print(store.scan("messages").collect().height, flush=True)


if __name__ == "__main__":
    main()

"""Prints the tables of a trainer for its page: `python -m configs.trainers trl` or `prime-rl`."""

import sys
from collections.abc import Iterator

from configs.trainers import prime_rl, trl
from configs.trainers.translation import ForeignTrainer, KeyRow

TRAINERS = {"trl": trl.TRAINER, "prime-rl": prime_rl.TRAINER}


def tables(trainer: ForeignTrainer) -> Iterator[str]:
    """Yield the lines of a page: a row for each setting here, then what has no counterpart, in the tables' order."""
    yield "## Keys side by side"
    yield ""
    yield f"| {trainer.name} | here | what differs |"
    yield "|---|---|---|"
    yield from map(_row, trainer.rows)
    yield ""
    yield "## Without a counterpart"
    yield ""
    yield "| keys | why |"
    yield "|---|---|"
    for entry in trainer.missing:
        yield f"| {_names(entry.old)} | {entry.why} |"


def _row(row: KeyRow) -> str:
    written = "; if it is not given, its default is written" if row.always else ""
    note = f"{row.note}{written}" if row.note else written.removeprefix("; ")
    return f"| {_names(row.old)} | `{row.new}` | {note} |".replace("|  |", "| |")


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


if __name__ == "__main__":
    print("\n".join(tables(TRAINERS[sys.argv[1]])))

"""The command of a package that writes demonstrations for a supervised warm start: what all of them ask and write."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Files:
    """Where demonstrations go, and what a small tokenizer shall keep whole."""

    rows: Path
    words: Path | None

    def write(self, rows: Iterable[Mapping[str, Any]], words: Sequence[str]) -> None:
        """Write the demonstrations as JSON lines, and the words as a JSON list where they were asked for."""
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if self.words:
            self.words.write_text(json.dumps(words), encoding="utf-8")


def command(about: str | None, count: int = 4096) -> argparse.ArgumentParser:
    """Return the parser of such a command; a package adds its own settings."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--words", type=Path, help="JSON file to write: what a small tokenizer shall keep whole")
    parser.add_argument("--count", type=int, default=count, help="rows")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other demonstrations")
    return parser


def read(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> tuple[Files, dict[str, Any]]:
    """Return where to write, and the settings: `count`, `seed` and those of the package."""
    choices = vars(parser.parse_args(argv))
    return Files(choices.pop("path"), choices.pop("words")), choices

"""The page on questions: its commands are commands, and its ids can be read."""

import re
import shlex
from pathlib import Path

from flows.cli import parse
from flows.queries.row_lineage import __doc__ as written

PAGE = (Path(__file__).parents[2] / "docs/questions.md").read_text()


def test_every_command_of_the_page_is_one() -> None:
    commands = re.findall(r"^(?:\$ )?stagecoach (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert parse(shlex.split(command))


def test_the_page_and_the_program_read_the_same_ids() -> None:
    assert written is not None
    for name in re.findall(r"`([A-Z]+(?:[:/][A-Z]+)*)`", PAGE.split("An id is written as")[1].split("Keys and")[0]):
        assert name in written

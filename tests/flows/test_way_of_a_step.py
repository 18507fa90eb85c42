"""The way of a step: the files from `stagecoach run` to the first request of a rollout, followed in a real run.

A file is on the way if one of its functions has a frame on the stack of the thread that sends the request to the
environment server, or on that of the main thread, which waits for it. Configuration is resolved and services are
started before, and have returned by then.
"""

import re

import pytest

from tests.fixtures.programs import ROOT, said_by

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
MOST = 12
BLOCK = re.compile(r"to the first request of a rollout:\n\n```\n(.*?)```", re.DOTALL)


def test_a_request_is_sent_by_few_files_and_contributing_lists_them(models, root):
    small = str(ROOT / "tests/acceptance/small.toml")
    run = "run", "demo", small, f"model.path={models['a']}", "steps=1", "--store", str(root)
    files = said_by("-m", "tests.fixtures.programs.traced", *run)
    (block,) = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    listed = re.findall(r"\S+\.py", block)
    assert sorted(listed) == files
    assert len(files) <= MOST

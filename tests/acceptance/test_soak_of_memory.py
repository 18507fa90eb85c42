"""A run of 600 steps with real services is watched from outside: what its flow holds does not grow with its steps."""

import re
import sys
import time
from statistics import linear_regression

import psutil
import pytest

from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(3600)]

STEPS, WARM = 600, 300
MOST_MB, MOST_RISE_MB = 700, 20
"""Of the flow's own memory, and of its rise in 1,000 steps after the warm ones."""
SETTINGS = (
    f"steps={STEPS}",
    "assignment.groups_per_step=2",
    "assignment.group_size=4",
    "rollout.max_tokens=12",
    "evaluation.every=0",
    "packing.tokens_per_row=256",
    "algorithm.type=reinforce_pp",
    "packing.zero_advantages=true",
    'filtering.filters=[{type="errored"},{type="incomplete_group"}]',
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Steps, own megabytes, open files and threads of the flow's process, every few seconds after the warm steps."""
    place = tmp_path_factory.mktemp("long")
    tiny_qwen3(place / "model", seed=3)
    log = place / "log"
    command = [sys.executable, "-m", "flows.cli", "run", "demo", *SETTINGS, f"model.path={place / 'model'}"]
    with log.open("wb") as out:
        flow = psutil.Popen([*command, "--name", "long", "--store", place / "store"], stdout=out, stderr=out, cwd=ROOT)
        watched = watch(flow, log)
    assert flow.wait() == 0, log.read_text()[-2000:]
    rows = [each for each in watched if WARM < each[0] < STEPS]
    assert len(rows) > 20
    return list(zip(*rows, strict=True))


def test_a_long_run_stays_small(seen):
    _, megabytes, files, threads = seen
    half = len(files) // 2
    assert max(megabytes) < MOST_MB
    assert min(files[half:]) <= max(files[:half]) and min(threads[half:]) <= max(threads[:half])


@pytest.mark.xfail(strict=True, reason="rows of the ledger and lists of files are held: benchmarks/endurance.md")
def test_a_long_run_does_not_grow(seen):
    rise = linear_regression(*seen[:2]).slope * 1000
    print(f"{max(seen[1]):.0f} MB at most, {rise:.0f} MB in 1,000 steps")
    assert rise < MOST_RISE_MB


def watch(flow, log):
    """Return steps, own megabytes, open files and threads of a process, every few seconds until it ends."""
    seen = []
    while flow.poll() is None:
        try:
            step = max(map(int, re.findall(r"^step +(\d+)/", log.read_text(errors="replace"), re.M)), default=0)
            with flow.oneshot():
                seen.append((step, flow.memory_full_info().uss / 1e6, flow.num_fds(), flow.num_threads()))
        except psutil.Error:
            break
        time.sleep(5.0)
    return seen

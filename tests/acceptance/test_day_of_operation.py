"""A day of a store in minutes: a schedule, two writers of one run, maintenance beside them, restarts, a lost table.

Once with one clock, and once where the maintenance has a clock that is eight days ahead, by libfaketime (Debian's
package of that name). Writers keep their clock: Python's `sleep` is refused under libfaketime 0.9.10.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from storage.store import open_store
from tests.fixtures.driving import check_once
from tests.fixtures.faults import happened
from tests.fixtures.serving import SMALL, serving

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS = 40
FAKETIME = [*Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1")]
AHEAD = ["env", *(f"LD_PRELOAD={library}" for library in FAKETIME), "FAKETIME=+8d", "DONT_FAKE_MONOTONIC=1"]


@pytest.mark.fault("process", "a day of restarts, second writers and a lost table", "nothing lost, nothing doubled")
@pytest.mark.parametrize(
    "clock",
    [
        pytest.param([], id="one clock"),
        pytest.param(AHEAD, id="ahead", marks=pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")),
    ],
)
def test_a_day_loses_and_doubles_nothing(tmp_path_factory, clock):
    with serving(tmp_path_factory.mktemp("day")) as served:
        served.schedule(60, **served.of_the_tiny_model(steps=1))
        served.wait_for_firings(1)

        sources = [f"model.path={served.place / 'model'}", f"data.path={served.place / 'rows.jsonl'}"]
        command = ["sft", "sft_demo", *sources, *SMALL, f"steps={STEPS}", "seed=5", "name=shared", "--plain"]
        program = [sys.executable, "-m", "flows.cli", *command, "--store", str(served.store)]
        writers = [served.begin(*program) for _ in range(2)]
        happened(f"two writers of one run: {[writer.pid for writer in writers]}")
        for beside in (["maintain"], ["gc", "--keep-last", "1", "--dry-run"], ["repair", "--deep"], ["runs"]):
            done = served.stagecoach(*beside, "--store", str(served.store), clock=clock)
            assert done.returncode == 0, f"{beside}: {done.stdout}{done.stderr}"
        assert " shared " in done.stdout and "its process is gone" not in done.stdout

        worker = next(process for process in served.processes if "worker" in process.args)
        os.killpg(worker.pid, signal.SIGTERM)
        served.restart_server()
        served.worker()
        happened(f"SIGTERM to the server and to worker {worker.pid}")
        assert [writer.wait(600) for writer in writers] == [0, 0], served.log()
        fired = served.wait_for_firings(3)

        runs = [served.run_of(flow_run) for flow_run in fired]
        store = open_store(served.store)
        trained = {run: {entry.step for entry in store.ledger.entries(run=run, stage="training")} for run in runs}
        assert len(set(runs)) == 3 and set(map(frozenset, trained.values())) == {frozenset({0})}
        assert {entry.step for entry in store.ledger.entries(run="shared", stage="training")} == set(range(STEPS))
        check_once(served.store, "shared")

        served.close()  # a table is lost while nothing runs
        before = {(entry.run, entry.stage, entry.step, entry.key) for entry in store.ledger.entries()}
        shutil.rmtree(served.store / "tables" / "ledger")
        (served.store / "heads" / "ledger.json").unlink()
        happened("the ledger is gone, and its head")
        refused = served.stagecoach("maintain", "--store", str(served.store))
        assert refused.returncode == 2 and "--trust-ledger" in refused.stderr, refused.stdout + refused.stderr
        rebuilt = served.stagecoach("repair", "--deep", "--store", str(served.store))
        assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
        after = {(entry.run, entry.stage, entry.step, entry.key) for entry in open_store(served.store).ledger.entries()}
        assert after == before

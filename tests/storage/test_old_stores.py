"""Stores that earlier commits wrote, each with another form of its logs, are read, resumed, replayed and maintained.

`stores/NAME.tar.xz` is the small run of `tests.fixtures.rehearsal`, three steps of it, as the commit wrote it:
library-commits 863056bc (first of layout 2), unsealed-commits 18fa79b2, sealed-commits 9dd8c109 (300 commits back).
"""

import tarfile
from pathlib import Path

import pytest

from storage.roots import open_root
from storage.store import open_store
from tests.fixtures import rehearsal, replays
from tests.fixtures.commands import run_command
from tests.fixtures.faults import happened

STORES = sorted((Path(__file__).parent / "stores").glob("*.tar.xz"))
NUM_ENTRIES = 23


@pytest.fixture(params=STORES, ids=lambda path: path.name.partition(".")[0])
def old(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    happened(f"the store of {request.param.name}")
    return tmp_path / "store"


@pytest.mark.fault("files", "a store of an earlier version", "nothing is wrong, every command reads it")
def test_nothing_is_wrong_with_an_old_store(old, capsys):
    assert run_command(capsys, "repair", "--deep", "--store", str(old)) == (0, "nothing is wrong\n")
    assert not open_root(str(old)).names("quarantine")
    store = open_store(old)
    assert len(store.ledger.entries()) == NUM_ENTRIES and len(store.policies.names()) == 1
    for command in (("runs",), ("show", "base"), ("maintain",), ("gc", "--dry-run")):
        status, out = run_command(capsys, *command, "--store", str(old))
        assert status == 0, out
    assert run_command(capsys, "repair", "--deep", "--store", str(old)) == (0, "nothing is wrong\n")


@pytest.mark.fault("files", "a store of an earlier version", "it goes on, no work is done twice")
def test_an_old_run_goes_on(old):
    before = {entry.row_id for entry in open_store(old).ledger.entries()}
    store = rehearsal.rehearse(old, "base", steps=4)
    after = store.ledger.entries()
    assert before < {entry.row_id for entry in after}
    assert {entry.step for entry in after if entry.stage == "training"} == {0, 1, 2, 3}
    assert all(store.read([piece]).num_rows == piece.rows for entry in after for piece in entry.outputs)


@pytest.mark.fault("files", "a store of an earlier version", "its rollouts are taken, the rest is computed")
def test_an_old_run_is_replayed_from_its_rollouts(old):
    rollouts = {entry.key for entry in open_store(old).ledger.entries(stage="rollout")}
    session, steps = replays.walk(replays.ask(old, overrides=[replays.RLOO], name="again"))
    assert len(steps) == 3
    assert {entry.key for entry in session.context.store.ledger.entries(run="again", stage="rollout")} == rollouts

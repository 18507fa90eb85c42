"""Gc, retention and repair over S3: what they do to a directory they do to a bucket."""

import pytest

from storage.errors import PolicyAbsent, SliceExpired
from storage.maintenance.compact import maintain
from storage.maintenance.plan import PolicyRetention, at_work, plan_removal
from storage.maintenance.repair import inspect_logs, inspect_policies, inspect_slices, repair_logs
from storage.maintenance.sweep import Retention, carry_out, expire
from storage.store import open_store
from tests.fixtures.histories import contents, lasting, train

pytestmark = pytest.mark.engine


@pytest.mark.nightly
@pytest.mark.usefixtures("long_ago")
def test_a_run_goes_weights_are_thinned_and_what_is_kept_reads(s3_root):
    store = open_store(s3_root)
    train(store, "a", "xy")
    train(store, "b", "xzzz")
    elsewhere = open_store(s3_root)
    before = contents(elsewhere, ["b"])
    going = plan_removal(store, ["b"], retention=PolicyRetention())
    swept = carry_out(store, going)
    assert (swept.rows, swept.slices, swept.policies) == (4, 3, 2)
    assert not [path for path in store.root.file_sizes("") if path.startswith(("removals", "policies/training-xy"))]
    for reader in (elsewhere, open_store(s3_root)):
        assert contents(reader, ["b"]) == before
        assert reader.ledger.entries(run="a") == []
        with pytest.raises(PolicyAbsent, match="were removed on"):
            reader.policies.directory("training-xz")
    assert store.policies.names() == ["training-x", "training-xzz", "training-xzzz"]
    assert at_work(store) == []
    maintain(store, 0)
    assert contents(open_store(s3_root), ["b"]) == before


def test_rows_expire(s3_root):
    store = open_store(s3_root)
    train(store, "a", "xx")
    assert expire(store, Retention("messages", 0)).slices == 4
    with pytest.raises(SliceExpired):
        contents(open_store(s3_root), ["a"])
    lasting(store, ["a"])


def test_a_log_is_mended(s3_root):
    store = open_store(s3_root)
    train(store, "a", "xxx")
    before = contents(store, ["a"])
    log = "tables/messages/_delta_log"
    last = max(name for name in store.root.names(log) if name.endswith(".json"))
    store.root.write(f"{log}/{last}", store.root.read(f"{log}/{last}")[:50])
    (mended,) = repair_logs(store.root, inspect_logs(store.root))
    assert len(mended.restored) == 1 and mended.quarantine.startswith(s3_root)
    again = open_store(s3_root)
    assert contents(again, ["a"]) == before
    assert inspect_slices(again, deep=True) == inspect_policies(again) == []
    assert again.scan("messages").collect().height == sum(len(rows[0]) for rows in before.values())

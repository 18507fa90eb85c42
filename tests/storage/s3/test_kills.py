"""A writer killed at chosen moments over S3: readers see whole or nothing, the next one goes on, orphans are swept."""

import subprocess
import sys

import pyarrow.fs as pafs
import pytest

from storage.maintenance.compact import vacuum
from storage.policies.store import Policies
from storage.store import Store, open_store
from tests.fixtures.faults import happened
from tests.fixtures.rows import messages
from tests.storage.s3 import dying_writer as s3_dying

pytestmark = pytest.mark.engine

NAMES = ("config.json", "model.safetensors", "tokenizer.json")

HALF = """
import os, signal, sys, time
import boto3
from storage.roots import open_root
from tests.fixtures.faults import happened
root = open_root(sys.argv[1])
stream = root.writer("policies/k/half & more")
for _ in range(8):
    stream.write(bytes(4 << 20))
s3 = boto3.client("s3", region_name=root.bucket.region, endpoint_url=root.bucket.endpoint)
while not s3.list_multipart_uploads(Bucket=root.bucket.name).get("Uploads"):  # parts are sent in the background
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def die(url: str, moment: str) -> None:
    command = [sys.executable, "-m", "tests.storage.s3.dying_writer", url, moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    happened("status -9")


def objects(store: Store, below: str) -> list[str]:
    return [path for path in _paths(store, below) if path.endswith((".parquet", *NAMES))]


def _paths(store: Store, below: str) -> list[str]:
    found = store.root.files.get_file_info(pafs.FileSelector(below, allow_not_found=True, recursive=True))
    return [info.path for info in found if "_delta_log" not in info.path]


@pytest.mark.fault("process", "a writer to S3 is killed", "whole or absent; the next writer goes on")
@pytest.mark.parametrize(
    ("moment", "committed", "visible"),
    [
        ("before messages", 0, 0),
        ("after messages", 1, 0),
        ("before ledger", 1, 0),
        ("after ledger", 1, 1),
    ],
)
def test_a_commit_is_whole_or_not_at_all(s3_root, moment, committed, visible):
    die(s3_root, moment)
    store = open_store(s3_root)
    assert len(store.slices.table("messages").active_files()) == committed
    assert len(store.ledger.entries()) == visible
    assert store.scan("messages").collect().height == 3 * visible
    assert len(objects(store, "tables/messages")) == 1, "its file is there, named or not"

    s3_dying.commit(store, "second")
    (entry,) = open_store(s3_root).ledger.entries()
    assert entry.attempt == ("first" if visible else "second")
    assert store.read(entry.outputs).equals(messages(3))
    assert store.scan("messages").collect().height == 3

    num_deleted, only_copies = vacuum(store, store.slices.table("messages"), retention_hours=0)
    assert (num_deleted, only_copies) == (1 - committed, []), "a file that no log names goes"
    assert store.read(entry.outputs).equals(messages(3))


@pytest.mark.fault("process", "a writer to S3 is killed", "whole or absent; the next writer goes on")
@pytest.mark.parametrize("moment", ["during upload", "before manifest", "after manifest"])
def test_a_policy_is_complete_or_absent(s3_root, moment, tmp_path):
    die(s3_root, moment)
    complete = moment == "after manifest"
    store = open_store(s3_root)
    store.policies = Policies(store.root, cache=tmp_path / "copies")
    assert store.policies.names() == (["policy"] if complete else [])
    num_left = len(objects(store, "policies"))
    assert num_left == {"during upload": 1, "before manifest": 3, "after manifest": 3}[moment]

    s3_dying.publish(store, "second")
    directory = store.policies.directory("policy", verify=True)
    assert (
        directory.joinpath("config.json").read_text().startswith(f"config.json of {'first' if complete else 'second'}")
    )
    assert store.policies.remove_unfinished(hours=1) == 0, "what is young may be about to be named"
    assert store.policies.remove_unfinished(hours=0) == (0 if complete else num_left)
    assert len(objects(store, "policies")) == 3
    fresh = Policies(store.root, cache=tmp_path / "other copies")
    assert sorted(path.name for path in fresh.directory("policy", verify=True).iterdir()) == sorted(NAMES)


@pytest.mark.fault("process", "a writer is killed within an upload in parts", "the upload is given up")
def test_an_upload_in_parts_that_never_ended_is_given_up(s3_root):
    store = open_store(s3_root)
    large = bytes(range(256)) * (1 << 17)  # 32 MiB: more than one part
    assert store.root.write("tables/large", large).size == len(large)
    assert store.root.read("tables/large") == large
    command = [sys.executable, "-c", HALF, s3_root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    happened("status -9")
    assert not store.root.exists("policies/k/half & more")
    assert open_store(f"{s3_root}-2").policies.remove_unfinished(hours=0) == 0, "another store's is not ours"
    assert store.policies.remove_unfinished(hours=0) == 1
    assert store.policies.remove_unfinished(hours=0) == 0

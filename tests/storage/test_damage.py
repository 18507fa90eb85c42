"""Bytes on disk that are not those written are found before a row of them is used."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import DamagedSlice, StoreError
from storage.refs import Slice
from storage.store import Store, open_store
from tests.fixtures.rows import entry, messages


@pytest.fixture
def piece(store: Store) -> Slice:
    piece = store.append("messages", messages(20, 50), run="run", step=2, key="k", attempt="a")
    store.ledger.commit(entry("k", outputs=(piece,)))
    return piece


@pytest.fixture
def file(root: Path, piece: Slice) -> Path:
    return root / "tables/messages" / piece.files[0].path


def flipped(file: Path, times: int) -> Iterator[int]:
    """Flip one bit of a file after the other, each in the file as it was, which it is again in the end."""
    good, chance = file.read_bytes(), random.Random(4)
    for bit in (chance.randrange(len(good) * 8) for _ in range(times)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        yield bit
    file.write_bytes(good)


@pytest.mark.engine
def test_any_flipped_bit_is_found(root: Path, piece: Slice, file: Path) -> None:
    silent = 0
    for _ in flipped(file, 150):
        with pytest.raises(DamagedSlice, match="SHA-256") as caught:
            open_store(root).read([piece])
        assert "table 'messages', run 'run', attempt 'a'" in caught.value.where
        silent += _reads_without_complaint(file)
    assert open_store(root).read([piece]).equals(messages(20, 50))
    assert silent > 50  # not vacuous: most of these flips pass a plain reader unseen


def _reads_without_complaint(file: Path) -> bool:
    try:
        pq.ParquetFile(file).read()
    except (OSError, pa.ArrowException):
        return False
    return True


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_file_is_found(root: Path, piece: Slice, file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedSlice, match="bytes instead of"):
        open_store(root).read([piece])


def test_a_missing_file_is_found(root: Path, piece: Slice, file: Path) -> None:
    file.unlink()
    with pytest.raises(DamagedSlice) as caught:
        open_store(root).read([piece])
    assert "run 'run'" in caught.value.where


def test_a_file_of_other_rows_under_the_same_name_is_found(root: Path, store: Store, piece: Slice, file: Path) -> None:
    other = store.append("messages", messages(20, 49), run="run", step=2, key="k", attempt="b")
    file.write_bytes((root / "tables/messages" / other.files[0].path).read_bytes())
    with pytest.raises(DamagedSlice):
        store.read([piece])


@pytest.mark.engine
def test_a_flipped_bit_in_the_ledger_is_found_or_harmless(root: Path, store: Store, piece: Slice) -> None:
    (file,) = (root / "tables/ledger/run=run").glob("*.parquet")
    found = 0
    for _ in flipped(file, 100):
        try:
            entries = open_store(root).ledger.entries()
        except StoreError:
            found += 1
        else:
            assert entries == [entry("k", outputs=(piece,))]
    assert found > 30


def test_a_torn_last_log_file_is_set_aside(root: Path, store: Store, piece: Slice) -> None:
    log = root / "tables/messages/_delta_log"
    store.append("messages", messages(3), run="run", step=3, key="l", attempt="never named")
    last = max(log.glob("*.json"))
    last.write_bytes(b"\0" * last.stat().st_size)
    again = open_store(root)
    assert again.read([piece]).num_rows == 20
    later = again.append("messages", messages(2), run="run", step=3, key="l", attempt="b")
    assert again.read([later]).num_rows == 2
    assert last.with_name(last.name + ".torn").exists()


def test_a_torn_checkpoint_is_set_aside(root: Path, store: Store, piece: Slice) -> None:
    for number in range(12):
        store.append("messages", messages(1), run="run", step=3, key="l", attempt=f"a{number}")
    (checkpoint,) = (root / "tables/messages/_delta_log").glob("*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    again = open_store(root)
    assert again.append("messages", messages(2), run="run", step=3, key="l", attempt="b").rows == 2
    assert len(again.slices.table("messages").active_files()) == 14

"""Tables and questions of a store on an object store: the same door, no extension of the database."""

import pytest

import storage
from storage.errors import LayoutError
from storage.read.sql import ask
from storage.store import open_store
from tests.fixtures.histories import add, counts, share
from tests.fixtures.s3_host import S3Host

pytestmark = [pytest.mark.engine, pytest.mark.essential]


def test_a_bucket_answers_like_a_directory(s3: S3Host, s3_root: str) -> None:
    with pytest.raises(LayoutError, match="there is no store"):
        storage.open(s3_root)
    store = open_store(s3_root)
    for key in ("1", "2", "3"):
        add(store, key, "a", count=int(key))
    share(store, "1", "b")
    tables = storage.open(s3_root)
    assert counts(tables.messages) == {"1": 1, "2": 2, "3": 3}
    assert counts(tables.run("b").messages) == {"1": 1}
    question = "select key, count(*) as num from a.messages where step > 1 group by key order by key"
    assert ask(tables, question).to_pylist() == [{"key": "2", "num": 2}, {"key": "3", "num": 3}]

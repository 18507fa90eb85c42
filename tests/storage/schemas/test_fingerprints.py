"""The tables as they are on disk in stores that exist: a change of schema is a new column or a new stage version."""

import hashlib
import tomllib
from pathlib import Path

import pytest

from storage.schemas.contract import Table
from storage.schemas.stage_tables import TABLES

FINGERPRINTS = tomllib.loads(Path(__file__).with_name("fingerprints.toml").read_text("utf-8"))


def fingerprint(table):
    """Return the digest of names, types and nullability of the stored columns, in order."""
    columns = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in table.stored]
    return hashlib.sha256("\n".join(columns).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_is_what_stores_hold(name):
    assert fingerprint(TABLES[name]) == FINGERPRINTS[name]


def test_no_table_is_forgotten():
    assert FINGERPRINTS.keys() == TABLES.keys()


def test_a_fingerprint_sees_type_and_nullability():
    policies = TABLES["policies"]
    changed = [Table(policies.name, policies.row, policies.row_id, policies.columns[:count]) for count in (3, 4)]
    assert len({fingerprint(table) for table in (policies, *changed)}) == 3

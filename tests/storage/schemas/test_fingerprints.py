"""The tables as they are on disk in stores that exist: a change of schema is a new column or a new stage version."""

import hashlib

import pytest

from storage.schemas.contract import Table
from storage.schemas.stage_tables import TABLES

FINGERPRINTS = {
    "examples": "cb8277211395f040",
    "assignments": "2f945692f00e89f4",
    "traces": "6cb292021ba4b8dc",
    "messages": "3a26c927918e86eb",
    "token_policies": "13a23d7de64dff31",
    "turns": "ed12d93048b9f96c",
    "images": "c1f772282822a36d",
    "image_tensors": "b238578589a1b3c9",
    "engine_metrics": "c252250006fd8cda",
    "intakes": "d57b29e3897eface",
    "stale_groups": "6af3d9a626b433ca",
    "intake_loads": "7204d9bf323f1810",
    "verdicts": "e29a2ca7a4b8baa4",
    "samples": "d205ab7633c081bb",
    "batches": "abc94916d492f093",
    "batch_images": "264c55034ddc0fa7",
    "updates": "fbe4b3bbbdd5b8d5",
    "token_statistics": "846573a040103e53",
    "token_masks": "62685cd2da87d360",
    "policies": "8ff5110fef399d4b",
    "ledger": "66983cba164b52a1",
    "runs": "e805be1414ef873c",
    "regrades": "7af11e2ca7b836e7",
    "decisions": "555afbfe818afe12",
    "references": "660a643fa89898ea",
    "estimator_states": "a9986209d2c31969",
    "difficulties": "00d001d02fe02555",
    "metrics": "5b9fd723a47571fc",
    "quarantines": "eae1ba336956d094",
    "retirements": "a0a95fa2082aaf9d",
    "notes": "4524c7aaf22a50c0",
}
"""By table. Whoever changes one has thought of the stores that hold the old one, and raised the stage's version."""


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

"""The tables that no stage writes, read from `system_tables.sql`: ledger, runs, quarantines, expired slices, notes,
answers of judges.
"""

from storage.schemas.contract import read_tables

SYSTEM_TABLES = read_tables("system_tables.sql")
"""Rows of these count as soon as they are committed; rows of stage tables count when the ledger names them."""
LEDGER, RUNS, QUARANTINES, EXPIRED_SLICES, NOTES_TABLE, JUDGE_ANSWERS = SYSTEM_TABLES

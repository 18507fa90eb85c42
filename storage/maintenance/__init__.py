"""Compaction, removal and repair of a store."""

"""Keeping a store in order: compaction, removal of what nobody keeps, repair of damage."""

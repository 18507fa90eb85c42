"""What can be asked of a store, as plain values: the one place that reads what runs recorded, for all that show it."""

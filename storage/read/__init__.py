"""Reading a store for analysis: frames, lineage as a graph of keys, SQL."""

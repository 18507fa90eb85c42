"""Where things live: Arrow tables in Delta Lake, weights in directories, one ledger that says what is finished."""

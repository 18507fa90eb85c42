"""The frames behind every page: read from the tables, told apart by nothing but what the ledger names."""

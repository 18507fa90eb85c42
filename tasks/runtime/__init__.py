"""What runs a stage: its record, its key and ledger row, its Prefect task."""

"""Delta Lake: tables, their logs, Parquet files, and commits of many results at once."""

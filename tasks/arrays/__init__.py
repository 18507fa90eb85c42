"""What stages share about rows: ragged columns, message graphs, seats, samples."""

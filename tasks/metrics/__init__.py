"""The metrics of a step: one row for each number, out of the tables that the step made."""

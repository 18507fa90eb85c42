"""Schemas: every table's columns, types and meaning, and the check of rows against them."""

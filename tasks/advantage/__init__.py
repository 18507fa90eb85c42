"""Advantage: what every kept trace and token is worth, by one of the algorithms."""

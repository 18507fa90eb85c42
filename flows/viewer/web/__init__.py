"""The web side: addresses are answered here, and hostile texts escaped; nothing here knows a table."""

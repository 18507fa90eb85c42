"""Pages: what each one says, as plain values; its template only lays them out."""

"""What each page says, as plain values; its template only lays them out."""

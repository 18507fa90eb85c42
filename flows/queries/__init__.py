"""The read model: what a store holds, as plain frames and values; nothing is printed and no page is laid out here."""

"""The inference engine: its process, its client, its weights, its checks."""

"""Environment servers: their processes, pools, examples and seats."""

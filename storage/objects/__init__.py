"""An S3-compatible object store: where it is, signed conditional requests, uploads of policies."""

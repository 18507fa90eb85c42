"""The same for a terminal: lists of traces, and one trace with its tokens in colour."""

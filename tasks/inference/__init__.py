"""Inference: engines, environment servers, sampling and grading, and the conversion of traces to rows."""

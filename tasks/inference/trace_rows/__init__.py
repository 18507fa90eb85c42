"""Traces as rows: messages, images, demonstrations, texts of tokens."""

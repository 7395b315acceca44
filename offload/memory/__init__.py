"""Bytes on the host: arenas, chunks and their layout."""

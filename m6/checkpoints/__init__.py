"""Checkpoints on disk: their format, finding, reading, delinking and loading them."""

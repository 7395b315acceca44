"""Pseudo-to-Real: the two phases of a run and their metrics."""

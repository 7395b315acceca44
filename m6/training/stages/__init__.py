"""Pseudo-to-Real: the two stages of a run and their metrics."""

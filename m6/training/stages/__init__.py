"""Pseudo-to-Real: the two stages of a run and what is measured of them."""

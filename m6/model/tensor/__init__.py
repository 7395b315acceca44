"""Matrices that are divided over several ranks: placements in one, two and three dimensions behind one interface."""

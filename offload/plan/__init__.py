"""Placement of chunks: the linear programme, its trace, and predicted times."""

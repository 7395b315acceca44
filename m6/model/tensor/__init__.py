"""Tensor parallelism: placements of matrices in one, two and three dimensions behind one interface."""

"""The HTTP service: runs requests of different lengths in batches with little padding."""

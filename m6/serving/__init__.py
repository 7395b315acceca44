"""The model behind HTTP: requests of any length in batches that waste little on padding."""

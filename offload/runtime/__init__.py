"""A training step with offloaded experts."""

"""The update of experts on the host."""

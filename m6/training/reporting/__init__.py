"""The reports of a run: losses, speed, expert loads, sample pictures, non-finite steps."""

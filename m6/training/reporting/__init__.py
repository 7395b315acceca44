"""The reports of a run: losses, speed, expert loads, sample images, non-finite steps."""

"""What a run needs before it starts."""

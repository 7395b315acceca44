"""A run from outside of the training: its folder, processes, signals, data and trackers."""

"""What a run needs around the training itself: its folder, processes, signals, data and trackers."""

"""The surroundings of a run's training: its folder, processes, signals, data and trackers."""

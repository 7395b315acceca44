"""A run's JSON: its sections, DeepSpeed's keys, and what may be combined."""

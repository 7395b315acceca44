"""The JSON of a run: its sections, DeepSpeed's keys, and the checks between them."""

"""Downstream tasks of fine-tuned models, with metrics, and baselines on the same rows."""

"""Downstream tasks of fine-tuned models, each with a metric and baselines on the same rows."""

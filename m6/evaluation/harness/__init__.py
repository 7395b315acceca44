"""Evaluation with EleutherAI's lm-evaluation-harness: the model's adapter, and Chinese tasks on data folders."""

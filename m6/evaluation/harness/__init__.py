"""Evaluation by EleutherAI's lm-evaluation-harness: an adapter of the model, and Chinese tasks on data folders."""

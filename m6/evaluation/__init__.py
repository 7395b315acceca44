"""Evaluation of runs: n-gram baselines, reports, generated pictures and downstream tasks."""

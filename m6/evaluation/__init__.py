"""Evaluation of runs: n-gram baselines, reports, generated images and downstream tasks."""

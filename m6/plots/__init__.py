"""Plots of runs and plans."""

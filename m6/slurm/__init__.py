"""Runs under Slurm: submitting, looking after, checking nodes. The jobs themselves are in scripts/slurm."""

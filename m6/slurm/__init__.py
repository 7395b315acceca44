"""Runs under Slurm: submission, status and node checks. The job scripts are in scripts/slurm."""

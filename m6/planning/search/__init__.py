"""The feasible layouts of a run, the search for the fastest one, and the job files for it."""

"""Products of sorted rows with each expert's matrix, and the operator of all experts."""

"""Products of sorted rows with each expert's matrix, and the experts' operator that uses them."""

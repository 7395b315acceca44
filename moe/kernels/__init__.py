"""Products of sorted rows with each expert's own matrix, and the operator that is made of them."""

"""What a run of a given size and length is predicted to learn."""

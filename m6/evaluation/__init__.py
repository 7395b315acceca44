"""What a run's numbers mean: n-gram baselines on the same targets, and the report that compares them."""

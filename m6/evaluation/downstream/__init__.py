"""Tasks after pretraining, each with its metric and with baselines on the same rows."""

"""Data sets: sources, Parquet shards with a manifest, the pretraining objectives and their batches."""

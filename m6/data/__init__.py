"""Data sets: sources, Parquet shards with a manifest, training objectives and their batches."""

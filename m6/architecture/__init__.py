"""The architecture of a model as plain data. Only ``configuration`` needs transformers, and so torch."""

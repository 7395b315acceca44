"""What a model is, as plain data. Only its configuration in transformers' class needs transformers, and so torch."""

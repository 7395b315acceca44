"""What a model is, as plain data: neither torch nor the models of transformers are imported, which takes seconds."""

"""What a model is, as plain data. The models of transformers, which take seconds to import, are not needed for it."""

"""The training of models and tokenizers. Start reading at loop.py."""

"""The training loop around DeepSpeed's engine; start reading at loop.py."""

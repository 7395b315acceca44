"""The engine of the training. Only this folder reads the internals of DeepSpeed's engine."""

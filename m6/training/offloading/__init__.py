"""The training of experts that the package ``offload`` holds, outside of DeepSpeed's engine."""

"""The training of experts in the store of the package ``offload``, outside of DeepSpeed's engine."""

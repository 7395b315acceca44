"""Experts in the store of ``offload``, outside of DeepSpeed's engine."""

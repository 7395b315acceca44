"""Which device a command computes on."""

import torch


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

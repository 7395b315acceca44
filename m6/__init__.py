"""M6-style multimodal mixture-of-experts pretraining."""

__version__ = "0.1.0"

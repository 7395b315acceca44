"""The fixtures of tiny models and hand-made rows."""

from tests.fixtures.packed_rows import pack, samples, tiny_config, tiny_model

__all__ = ["pack", "samples", "tiny_config", "tiny_model"]

"""The fixtures of tiny models and hand-made rows."""

from tests.fixtures.packed_rows import pack, tiny_config, tiny_model

__all__ = ["pack", "tiny_config", "tiny_model"]

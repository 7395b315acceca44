"""The configuration of an M6 model as a class of transformers."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from m6.architecture.names import without_auto_map
from m6.architecture.settings import MODEL_TYPE, ModelSettings
from m6.errors import UserError, nearest

# transformers, its Trainer and its quantisation add these keys to a configuration.
_TRANSFORMERS_KEYS = {
    "model_type",
    "_name_or_path",
    "name_or_path",
    "torch_dtype",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "num_labels",
    "_commit_hash",
    "auto_map",
    "use_cache",
    "quantization_config",
    "is_decoder",
}


class M6Config(PreTrainedConfig, ModelSettings):
    """The fields of :class:`ModelSettings` in a class for transformers to load and save.

    Raises:
        UserError: a key is unknown, or ``ModelSettings`` refuses a value.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "router_stats",
        "target_losses",
        "aux_loss",
        "aux_losses",
    ]
    # transformers sizes its key-value caches by num_hidden_layers.
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "num_layers"}

    def __post_init__(self, **kwargs: Any) -> None:
        valid = {field.name for field in fields(self)}
        for key in kwargs:
            if key not in _TRANSFORMERS_KEYS:
                raise UserError(f"M6Config has no field {key!r}{nearest(key, valid)}")
        # transformers' @strict could check these values too, but its errors are not ValueErrors.
        ModelSettings.__post_init__(self)
        super().__post_init__(**without_auto_map(self, kwargs))

    @classmethod
    def of(cls, settings: ModelSettings) -> M6Config:
        """The settings as a configuration of transformers; the same object if they are one."""
        return settings if isinstance(settings, M6Config) else cls(**asdict(settings))

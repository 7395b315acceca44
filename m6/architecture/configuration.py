"""The configuration of an M6 model as a class of transformers."""

from __future__ import annotations

import warnings
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
    "quantization_config",
    "is_decoder",
}


_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id")


def _fixed_id(name: str) -> property:
    """The id of a special token, which follows from the vocabulary: it takes this value and no other one."""
    of_vocabulary: property = getattr(ModelSettings, name)

    def get(self: M6Config) -> int:
        assert of_vocabulary.fget is not None
        return int(of_vocabulary.fget(self))

    def check(self: M6Config, value: int) -> None:
        if value != get(self):
            raise UserError(f"{name} is {value!r}, expected {get(self)}: special tokens follow the text pieces")

    return property(get, check, doc=of_vocabulary.__doc__)


class M6Config(PreTrainedConfig, ModelSettings):
    """The fields of :class:`ModelSettings` in a class for transformers to load and save.

    Raises:
        UserError: a key is unknown, ``ModelSettings`` refuses a value, or an id is not that of the vocabulary.
    """

    use_cache: bool = True
    pad_token_id = _fixed_id("pad_token_id")
    bos_token_id = _fixed_id("bos_token_id")
    eos_token_id = _fixed_id("eos_token_id")
    image_token_id = _fixed_id("image_token_id")

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
        for key in kwargs:
            if key not in _TRANSFORMERS_KEYS and key not in _IDS:
                raise UserError(f"M6Config has no field {key!r}{nearest(key, self._known())}")
        # transformers' @strict could check these values too, but its errors are not ValueErrors.
        ModelSettings.__post_init__(self)
        super().__post_init__(**without_auto_map(self, kwargs))

    @classmethod
    def _known(cls) -> set[str]:
        return {field.name for field in fields(cls)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See transformers. Keys that other tools have put into a saved configuration are kept, with a warning."""
        known = cls._known() | _TRANSFORMERS_KEYS | {*_IDS, *cls.attribute_map, "transformers_version"}
        others = {key: value for key, value in config_dict.items() if key not in known}
        made = super().from_dict({key: config_dict[key] for key in config_dict.keys() - others.keys()}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for key, value in others.items():
            warnings.warn(f"the saved M6Config has no field {key!r}{nearest(key, known)}; it is kept", stacklevel=2)
            setattr(config, key, value)
        return made

    @classmethod
    def of(cls, settings: ModelSettings) -> M6Config:
        """The settings as a configuration of transformers; the same object if they are one."""
        return settings if isinstance(settings, M6Config) else cls(**asdict(settings))

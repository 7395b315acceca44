"""M6's additions to transformers' ``generate``: token types and positions of a prompt, and checks of its length."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache

from m6.architecture.configuration import M6Config
from m6.decoding import TEMPERATURE, Decoding
from m6.errors import UserError
from m6.model.embeddings import derive_position_ids, derive_token_type_ids

_DECODINGS, _TEMPERATURE = "code_decodings", "code_temperature"
_OBJECTIVES = "learned_objectives"


class M6GenerationMixin(GenerationMixin):
    """``generate`` for prompts of the form ``[<image> x P]? source <bos> [begin of the target]``.

    P is the number of patches of an image.
    """

    config: M6Config

    @property
    def decodings(self) -> list[Decoding]:
        """The trained decoding methods for image codes, the default first.

        They are saved in ``generation_config.json``. A model without this entry decodes from left to right.
        """
        return getattr(self.generation_config, _DECODINGS, ["left_to_right"])

    @decodings.setter
    def decodings(self, value: list[Decoding]) -> None:
        self._keep(_DECODINGS, value)

    @property
    def code_temperature(self) -> float:
        """The default sampling temperature of image codes, saved together with ``decodings``.

        It is separate from transformers' ``temperature``, since the latter would change the sampling of texts.
        """
        return getattr(self.generation_config, _TEMPERATURE, TEMPERATURE)

    @code_temperature.setter
    def code_temperature(self, value: float) -> None:
        self._keep(_TEMPERATURE, value)

    @property
    def learned_objectives(self) -> list[str]:
        """The training objectives in ``generation_config.json``; none without this entry."""
        names = getattr(self.generation_config, _OBJECTIVES, None)
        return names if isinstance(names, list) else []

    @learned_objectives.setter
    def learned_objectives(self, value: list[str]) -> None:
        self._keep(_OBJECTIVES, value)

    def _keep(self, name: str, value: Any) -> None:
        setattr(self.generation_config, name, value)
        # With _from_model_config, from_pretrained would drop unknown entries of the file.
        self.generation_config._from_model_config = False

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Runs transformers' ``generate`` on left-padded prompts.

        Args:
            inputs: int64 [B, S] prompts, also accepted as ``input_ids``; each holds ``<bos>`` and at most one
                image. ``attention_mask``, ``token_type_ids`` and ``position_ids`` are derived when absent.
            generation_config: as in transformers.
            kwargs: as in transformers, and ``pixel_values``.

        Raises:
            UserError: a prompt has no ``<bos>``, two images or padding at its end, the source or the target would need
                more positions than the model has learned, or an argument does not work with this model.
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None:
            raise UserError("generate needs input_ids: a prompt is at least <bos>")
        settings, config = generation_config or self.generation_config, self.config
        _check_arguments(settings, kwargs)
        mask = kwargs.get("attention_mask")
        mask = (input_ids != config.pad_token_id).long() if mask is None else mask
        types = kwargs.get("token_type_ids")
        if types is None:
            types = derive_token_type_ids(input_ids, mask != 0, config.image_token_id, config.bos_token_id)
        positions = kwargs.get("position_ids")
        positions = derive_position_ids(types, mask) if positions is None else positions
        if not bool((mask[:, -1] != 0).all()):
            raise UserError(
                'a prompt ends in padding, which generate would continue; pad on the left (padding_side "left")'
            )
        _check_prompts(input_ids, config.bos_token_id, config.image_token_id, config.num_patches)
        self._check_length(input_ids.shape[1], positions, settings, kwargs)
        kwargs |= {"attention_mask": mask, "token_type_ids": types, "position_ids": positions}
        return super().generate(  # type: ignore[misc]  # its self is typed by a protocol
            input_ids, generation_config=generation_config, **kwargs
        )

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See transformers. Version 5.23 also gives the tokenizer of ``stop_strings`` to the forward pass; drop it."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc, arg-type]
        return {name: value for name, value in inputs.items() if name not in ("tokenizer", "assistant_tokenizer")}

    def _check_length(
        self, prompt_length: int, position_ids: Tensor, generation_config: GenerationConfig, kwargs: dict[str, Any]
    ) -> None:
        own = self.generation_config  # transformers takes from it all values not set in the given one
        new_tokens = kwargs.get("max_new_tokens", _first(generation_config.max_new_tokens, own.max_new_tokens))
        length = kwargs.get("max_length", _first(generation_config.max_length, own.max_length))
        if new_tokens is None and length is not None:
            new_tokens = length - prompt_length
        # Positions count the target only: source and image have their own.
        prompt, limit = int(position_ids[:, -1].max()) + 1, self.config.max_position_embeddings
        if new_tokens is not None and prompt + new_tokens > limit + 1:  # the last new token is never an input
            raise UserError(
                f"the target would have {prompt + new_tokens} tokens ({prompt} of the prompt, {new_tokens} new "
                f"ones), more than max_position_embeddings {limit} allow; lower max_new_tokens"
            )

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, past_key_values: Cache, inputs_embeds: Tensor, **_: Any
    ) -> Tensor | None:
        """Pads the mask to [B, K], the constant length of a static cache, so a compiled forward is reused.

        The model makes the prefix-LM mask from it. transformers' own mask would be causal everywhere.
        """
        if attention_mask is None:
            return None
        keys, _offset = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return torch.nn.functional.pad(attention_mask, (0, keys - attention_mask.shape[1]))


def _first(given: int | None, otherwise: int | None) -> int | None:
    return otherwise if given is None else given


def _check_arguments(settings: GenerationConfig, kwargs: dict[str, Any]) -> None:
    if kwargs.get("guidance_scale", settings.guidance_scale) not in (None, 1):
        raise UserError(
            "guidance_scale: generate knows no prompt without the condition; M6TextToImagePipeline guides pictures"
        )
    assisted = kwargs.get("assistant_model") is not None or kwargs.get(
        "assistant_early_exit", settings.assistant_early_exit
    )
    if assisted and kwargs.get("pixel_values") is not None:
        raise UserError(
            "assistant_model and assistant_early_exit: transformers gives an assistant no pictures; leave them out, or "
            "use prompt_lookup_num_tokens"
        )


def _check_prompts(input_ids: Tensor, bos_token_id: int, image_token_id: int, num_patches: int) -> None:
    if not bool((input_ids == bos_token_id).any(dim=1).all()):
        raise UserError("a prompt has no <bos>, which begins the target that generate continues")
    max_placeholders = int((input_ids == image_token_id).sum(dim=1).max())
    if max_placeholders > num_patches:
        raise UserError(
            f"a prompt holds {max_placeholders} <image> placeholders, but may hold only one picture of {num_patches}"
        )

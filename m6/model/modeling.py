"""The M6 Transformer: one stack of pre-LN blocks for images, source text and target.

``M6GenerationMixin`` adds to transformers' ``generate`` what a prompt needs: token types, positions, and checks of its
length.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.generic import can_return_tuple

from m6.architecture.configuration import M6Config
from m6.architecture.names import IGNORED_LABEL, TARGET
from m6.architecture.settings import ModelSettings
from m6.decoding import TEMPERATURE, Decoding
from m6.errors import UserError
from m6.model.attention import Rotation, StateLayout, prefix_lm_mask, rotation_of
from m6.model.blocks import M6Block, run_blocks, seed_layer
from m6.model.embeddings import M6Embeddings, derive_position_ids, derive_token_type_ids
from m6.model.initialization import initialize_parameters
from m6.model.outputs import Head, M6ModelOutput, M6Output, losses_of_logits
from moe import RoutingStats

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


class M6PreTrainedModel(PreTrainedModel):
    """The base class of both models: their settings for transformers."""

    config_class = M6Config
    config: M6Config
    base_model_prefix = "model"
    accepts_loss_kwargs = True  # transformers' Trainer then passes num_items_in_batch
    supports_gradient_checkpointing = True
    _no_split_modules = ["M6Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: ModelSettings) -> None:
        super().__init__(M6Config.of(config))

    def initialize_weights(self) -> None:
        """Initializes all tensors not loaded from a checkpoint; the values depend on ``torch.manual_seed``.

        transformers calls this method after construction and after loading.
        """
        initialize_parameters(self, int(torch.randint(2**62, (), device="cpu")), only_missing=True)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding; it is also the output matrix."""
        return self.base_model.get_submodule("embeddings.tokens")

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding by another one of the same shape."""
        self.base_model.get_submodule("embeddings").tokens = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refuses with a UserError: image codes follow the text pieces, so more pieces would move the ids of codes."""
        raise UserError(
            "the vocabulary of an M6 model cannot be resized: m6.model sets its text pieces and image codes"
        )


class M6Model(M6PreTrainedModel):
    """Embeddings, blocks and final norm, without the language-model head."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.embeddings = M6Embeddings(config)
        self.layers = nn.ModuleList(M6Block(config, index) for index in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layout = StateLayout()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        sample_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        dropout_seed: int | None = None,
    ) -> M6ModelOutput:
        """Runs the stack.

        Args:
            input_ids: int64 [B, S].
            pixel_values: [N, 3, image_size, image_size] in [-1, 1], in row-major order of the images' first
                ``<image>`` placeholders; None: no images.
            token_type_ids: int64 [B, S]: 0 image patch, 1 source, 2 target; derived for rows of one sample.
            position_ids: int64 [B, S]; derived when absent. Rows of a cache that were put into another order keep the
                positions of the old order, unless they are rows of one prompt.
            sample_ids: int64 [B, S]: 1, 2, ... in each packed row, 0 at padding.
            attention_mask: int64 [B, K] for rows of one sample each, including the cached tokens; 0 at padding.
                When absent, ``<pad>`` is padding. Ignored if ``sample_ids`` is given.
            inputs_embeds: refused, since placeholders and positions are found by ids; PEFT passes None.
            past_key_values: cache of earlier calls. Every query may attend to all of it, so images and source
                belong in the first call.
            use_cache: creates a DynamicCache if ``past_key_values`` is None.
            output_hidden_states: also returns the input of each block and the last hidden state.
            output_attentions: refused: no layer returns its attention weights, and the fused kernel does not compute
                them as a tensor.
            dropout_seed: determines the random numbers of each layer; None: the generators are not seeded.

        Raises:
            UserError: the placeholders do not match the images, these have another size, a text is longer than the
                model has positions, an input is missing and cannot be derived, or attention weights or embeddings are
                asked for.
        """
        if input_ids is None or inputs_embeds is not None:
            raise UserError("inputs_embeds: pictures, types and positions go by input_ids; pass those")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise UserError("output_attentions: no layer returns its attention weights; leave it out")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        seed_layer(dropout_seed, 0, input_ids.device)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        key_samples = self._key_samples(input_ids, sample_ids, attention_mask, past_key_values, past_length)
        query_index = torch.arange(input_ids.shape[1], device=input_ids.device) + past_length
        query_samples = key_samples.index_select(1, query_index)

        if token_type_ids is None:
            if sample_ids is not None:
                raise UserError(
                    "packed rows (sample_ids) need token_type_ids, which are derived only for rows of one sample"
                )
            if past_key_values is not None and past_length > 0:
                token_type_ids = torch.full_like(input_ids, TARGET)
            else:
                token_type_ids = derive_token_type_ids(
                    input_ids, query_samples != 0, self.config.image_token_id, self.config.bos_token_id
                )
        if position_ids is None:
            if past_key_values is not None and past_length > 0:
                position_ids = _positions_after(past_key_values, query_index, len(input_ids))
            else:
                position_ids = derive_position_ids(token_type_ids, query_samples)
        if past_key_values is not None and past_length == 0 and sample_ids is None:
            _keep_positions(past_key_values, token_type_ids, position_ids)

        if past_key_values is not None and input_ids.shape[1] == 1:
            # In a decoding step the only token is never a patch; the search for patches would synchronise the device.
            hidden_states = self.embeddings.embed_targets(input_ids, token_type_ids, position_ids)
        else:
            if past_length > 0 and bool((token_type_ids != TARGET).logical_and(query_samples != 0).any()):
                raise UserError(
                    f"source tokens follow {int(past_length)} cached tokens, which could not attend to them; "
                    "give pictures and source in one call"
                )
            hidden_states = self.embeddings(input_ids, token_type_ids, position_ids, pixel_values)

        hidden_states = self.layout.divided(hidden_states)
        # Built once: the mask is the same for all layers.
        mask = prefix_lm_mask(token_type_ids, key_samples, past_length)
        rotation = self.rotation(query_index)
        # fp32 also in a 16-bit model: small balance losses of many layers add up.
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        of_rows = torch.zeros(len(input_ids), dtype=torch.float32, device=hidden_states.device)
        router_stats: list[RoutingStats] = []
        all_hidden_states: list[Tensor] = []
        # transformers lowers num_hidden_layers for a draft that leaves early.
        layers = itertools.islice(enumerate(self.layers), self.config.num_layers)
        blocks = run_blocks(layers, hidden_states, mask, query_samples, rotation, past_key_values, dropout_seed)
        for output in blocks:
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
            hidden_states = output.hidden_states
            if output.aux_loss is not None and output.aux_losses is not None:
                aux_loss = aux_loss + output.aux_loss
                of_rows = of_rows + output.aux_losses.sum(1)
                router_stats.extend(output.router_stats)
        hidden_states = self.norm(self.layout.whole(hidden_states, *input_ids.shape))
        return M6ModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=(*all_hidden_states, hidden_states) if output_hidden_states else None,
            aux_loss=aux_loss,
            aux_losses=of_rows / (query_samples != 0).sum(1).clamp(min=1),
            router_stats=tuple(router_stats),
            past_key_values=past_key_values,
        )

    def rotation(self, query_index: Tensor) -> Rotation | None:
        """The rotation of queries and keys at these positions in a row, int64 [S]; None without rotary positions."""
        # Positions in the row serve packed rows too: samples do not attend to each other, and inside of a sample only
        # distances count.
        if not self.config.rotary_base:
            return None
        return rotation_of(
            query_index, self.config.hidden_size // self.config.num_attention_heads, self.config.rotary_base
        )

    def _key_samples(
        self,
        input_ids: Tensor,
        sample_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        past_length: int | Tensor,
    ) -> Tensor:
        """The sample of each key: int64 [B, K], 0 at padding and at unwritten positions of a cache."""
        batch, length = input_ids.shape
        keys = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
        name, samples = ("sample_ids", sample_ids) if sample_ids is not None else ("attention_mask", attention_mask)
        if samples is not None:
            # A static cache gives its length as a tensor; a comparison would synchronise the device.
            needed = length + (past_length if isinstance(past_length, int) else 0)
            if not needed <= samples.shape[1] <= keys:
                raise UserError(f"{name} has {samples.shape[1]} columns, but there are {needed} tokens")
            return F.pad(samples.long(), (0, keys - samples.shape[1]))
        index = torch.arange(length, device=input_ids.device) + past_length
        real = (input_ids != self.config.pad_token_id).long()
        return input_ids.new_ones(batch, keys).index_copy(1, index, real)


_NEXT = "m6_next_positions"


def _keep_positions(cache: Cache, token_type_ids: Tensor, position_ids: Tensor) -> None:
    """Keeps on a cache the position of each row's next target token, int64 [B], and the number of cached tokens."""
    following = torch.where(token_type_ids[:, -1] == TARGET, position_ids[:, -1] + 1, 0)
    setattr(cache, _NEXT, (following, token_type_ids.shape[1]))


def _positions_after(cache: Cache, query_index: Tensor, num_rows: int) -> Tensor:
    """The positions of target tokens that follow a cache, int64 [B, S].

    Raises:
        UserError: the first call with this cache was not one of this model, or had another number of rows.
    """
    following, length = getattr(cache, _NEXT, (None, 0))
    if following is None or len(following) != num_rows:
        raise UserError("position_ids are missing: the cache does not hold the rows of its first call")
    return following[:, None] + query_index - length


class M6ForConditionalGeneration(M6PreTrainedModel, M6GenerationMixin):
    """The model with its head over the joint vocabulary; the head's matrix is the token embedding."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.model = M6Model(self.config)
        self.head = Head()
        # transformers' generate reads the special tokens from here, not from the model's configuration.
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self.generation_config, name, getattr(config, name))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        sample_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        num_items_in_batch: Tensor | int | float | None = None,
        return_logits: bool = True,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        dropout_seed: int | None = None,
    ) -> M6Output:
        """Predicts the next token at every position, and computes the loss if labels are given.

        The other arguments are those of :meth:`M6Model.forward`.

        Args:
            labels: int64 [B, S], aligned with ``input_ids`` (this method shifts them), -100 for no loss.
            loss_weights: [B, S], one weight per label; 1 when absent.
            num_items_in_batch: divisor of the weighted sum of losses. If it is the sum of weights of the whole global
                batch, the losses of all micro-batches add up to the loss of the batch. Absent: the sum of weights of
                this call. The router losses of a row are means over its tokens. In training each row's router losses
                are weighted by its share of these items. In evaluation mode they are left out. Refused without labels:
                ``label_smoothing_factor`` of transformers' Trainer keeps these back, and compares each output with the
                token that was read there instead of the next one.
            return_logits: False saves memory: logits are computed only at labelled positions and not returned.
            logits_to_keep: number of last positions for logits, or int64 indices of positions; 0: all. Refused
                together with labels, since their losses need all positions.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise UserError("logits_to_keep: the loss of labels needs all positions; leave out one of them")
        if labels is None and num_items_in_batch is not None:
            raise UserError(
                "num_items_in_batch without labels: label_smoothing_factor of the Trainer would teach each output the "
                "token that was read there, not the next one; leave it at 0. For a compute_loss_func of your own, "
                "which shifts the labels itself, set model.accepts_loss_kwargs = False"
            )
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            sample_ids=sample_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            dropout_seed=dropout_seed,
            return_dict=True,
        )
        hidden_states: Tensor = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head.logits(hidden_states[:, kept], self._table, self.config) if return_logits else None
        loss = target_losses = None
        if labels is not None:
            targets = labels[:, 1:]
            labelled = (targets != IGNORED_LABEL).nonzero(as_tuple=True)
            if logits is not None:
                target_losses = losses_of_logits(logits[:, :-1][labelled], targets[labelled], self.config)
            else:  # logits of all positions would be the largest tensor of a training step
                states = hidden_states[:, :-1][labelled]
                target_losses = self.head.losses(states, self._table, targets[labelled], self.config)
            weights = torch.ones_like(target_losses)
            if loss_weights is not None:
                weights = loss_weights[:, 1:][labelled].to(target_losses)
            items = weights.sum() if num_items_in_batch is None else num_items_in_batch
            total = (weights * target_losses).sum()
            if self.training:
                of_rows = weights.new_zeros(len(labels)).index_add(0, labelled[0], weights)
                total = total + (of_rows * outputs.aux_losses).sum()
            loss = total / items
        return M6Output(
            loss=loss,
            logits=logits,
            target_losses=target_losses,
            hidden_states=outputs.hidden_states,
            aux_loss=outputs.aux_loss,
            router_stats=outputs.router_stats,
            past_key_values=outputs.past_key_values,
        )

    @property
    def _table(self) -> Tensor:
        """The matrix of the head."""
        return self.model.embeddings.tokens.weight

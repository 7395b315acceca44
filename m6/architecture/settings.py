"""The settings of an M6 model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from m6.architecture.names import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from m6.errors import UserError, nearest
from m6.renamed import with_new_moe_keys
from moe.config import MoEConfig

MODEL_TYPE = "m6"
"""The name of the architecture in the ``config.json`` of an exported model."""
PatchEncoderName = Literal["linear", "resnet", "efficientnet_lite0"]

LARGEST_VOCABULARY = 2**24
# The largest value of each size: far above any model, and small enough to compute with.
_SIZES = {
    "text_vocab_size": LARGEST_VOCABULARY,
    "hidden_size": 2**20,
    "num_layers": 10_000,
    "num_attention_heads": 2**16,
    "ffn_hidden_size": 2**24,
    "max_position_embeddings": 2**24,
    "image_size": 2**14,
    "patch_size": 2**14,
    "resnet_channels": 2**14,
    "moe_layer_frequency": 10_000,
    "codes_per_place": 2**8,
}
_EFFICIENTNET_SMALLEST_SIDE = 32  # of a patch; a smaller one shrinks to nothing before the last layer
_SIZES_FROM_0 = {"image_vocab_size": LARGEST_VOCABULARY, "code_grid_size": 2**12}


@dataclass(kw_only=True)
class ModelSettings:
    """One Transformer stack for pictures and text, M6 (arXiv 2103.00823).

    The defaults are M6-base. ``moe`` holds the keyword arguments of :class:`moe.MoEConfig`; with it, every
    ``moe_layer_frequency``-th feed-forward is a mixture of experts, M6-T (arXiv 2105.15082).

    Args:
        text_vocab_size: pieces of the text tokenizer; joint ids ``[0, text_vocab_size)``.
        image_vocab_size: codes of the image tokenizer; they follow the 16 special tokens.
        hidden_size: width of the residual stream.
        num_layers: Transformer blocks.
        num_attention_heads: divides ``hidden_size``.
        ffn_hidden_size: inner width of a dense feed-forward and of each expert.
        max_position_embeddings: learned positions of source text and of target (text or image codes).
        rotary_base: base of rotary positions (arXiv 2104.09864), beside the learned ones; 0: none.
        code_grid_size: codes in a row of a generated picture; adds learned row and column positions to image codes
            (DALL-E, arXiv 2102.12092, appendix B.1); 0: no such positions.
        codes_per_place: codes at each place of a generated picture, one of each codebook of the image tokenizer; they
            follow each other and share their row and column. Divides ``image_vocab_size``: the books are equally large.
        image_size: side of a picture in pixels.
        patch_size: side of a patch in pixels; divides ``image_size``.
        patch_encoder: network that maps a patch to a vector, see :mod:`m6.model.patch_encoders`.
        resnet_channels: channels of the last stage of ``patch_encoder`` "resnet", a multiple of 32; 2,048: a ResNet-50.
        hidden_dropout: dropout rate after the embeddings, the attention output and the feed-forward output.
        attention_dropout: dropout rate on the attention weights.
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of every LayerNorm.
        moe: keyword arguments of :class:`moe.MoEConfig`, or None for a dense model.
        moe_layer_frequency: k: every k-th layer is sparse, that is layers k-1, 2k-1, ... (counted from 0).

    Raises:
        UserError: a key of ``moe`` is unknown, a value is out of range, or two values contradict each other.
    """

    text_vocab_size: int = 21128
    image_vocab_size: int = 8192
    hidden_size: int = 1024
    num_layers: int = 24
    num_attention_heads: int = 16
    ffn_hidden_size: int = 4096
    max_position_embeddings: int = 512
    rotary_base: float = 0.0
    code_grid_size: int = 0
    codes_per_place: int = 1
    image_size: int = 256
    patch_size: int = 64
    patch_encoder: PatchEncoderName = "linear"
    resnet_channels: int = 2048
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    moe: dict[str, Any] | None = None
    moe_layer_frequency: int = 1

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_against_each_other()

    def _check_ranges(self) -> None:
        for name, largest in _SIZES.items():
            value = getattr(self, name)
            # Not isinstance: a bool is an int.
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be a positive integer, found {value!r}")
            _check_largest(name, value, largest)
        for name, largest in _SIZES_FROM_0.items():
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UserError(f"{name} must be an integer of at least 0, found {value!r}")
            _check_largest(name, value, largest)
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < 1:
                raise UserError(f"{name} must be a rate in [0, 1), found {value!r}")
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise UserError(f"{name} must be a positive number, found {value!r}")
        if not _is_number(self.rotary_base) or not (self.rotary_base == 0 or self.rotary_base > 1):
            raise UserError(f"rotary_base must be 0 or a number above 1, found {self.rotary_base!r}")
        encoders = get_args(PatchEncoderName)
        if self.patch_encoder not in encoders:
            raise UserError(
                f"patch_encoder {self.patch_encoder!r} is unknown{nearest(str(self.patch_encoder), encoders)}"
            )

    def _check_against_each_other(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.rotary_base and self.hidden_size % (2 * self.num_attention_heads):
            raise UserError(
                f"rotary_base needs heads of an even size, found hidden_size {self.hidden_size} / num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.image_vocab_size % self.codes_per_place:
            raise UserError(
                f"image_vocab_size {self.image_vocab_size} is not divisible by codes_per_place {self.codes_per_place}"
            )
        if self.image_size % self.patch_size:
            raise UserError(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        if self.resnet_channels % 32:
            raise UserError(
                f"resnet_channels must be a multiple of 32, found {self.resnet_channels}; the nearest is "
                f"{max(32, 32 * round(self.resnet_channels / 32))}"
            )
        if self.resnet_channels != type(self).resnet_channels and self.patch_encoder != "resnet":
            raise UserError(
                f'resnet_channels {self.resnet_channels} needs patch_encoder "resnet", found {self.patch_encoder!r}'
            )
        if self.patch_encoder == "efficientnet_lite0" and self.patch_size < _EFFICIENTNET_SMALLEST_SIDE:
            raise UserError(
                f'patch_encoder "efficientnet_lite0" needs a patch_size of at least {_EFFICIENTNET_SMALLEST_SIDE}, '
                f"found {self.patch_size}"
            )
        if self.moe is not None:
            if isinstance(self.moe, dict):
                self.moe = with_new_moe_keys(self.moe)  # of an older export
            if self.moe_layer_frequency > self.num_layers:
                raise UserError(
                    f"moe_layer_frequency {self.moe_layer_frequency} exceeds num_layers {self.num_layers}: "
                    "no layer would be sparse"
                )
            self.moe_config()

    def moe_config(self) -> MoEConfig:
        """The section ``moe`` as a ``moe.MoEConfig``.

        Raises:
            UserError: a key is unknown, or ``moe.MoEConfig`` rejects a value.
        """
        valid = {field.name for field in fields(MoEConfig)}
        if not isinstance(self.moe, dict):
            raise UserError(f"moe must hold the keyword arguments of moe.MoEConfig, found {self.moe!r}")
        for key in self.moe:
            if key not in valid:
                raise UserError(f"moe.{key}: unknown key{nearest(key, valid)}")
        if "num_experts" not in self.moe:
            raise UserError("moe.num_experts: missing")
        try:
            return MoEConfig(**self.moe)
        except ValueError as error:  # the message begins with the name of the field
            raise UserError(f"moe.{error}") from None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward of layer ``layer`` (counted from 0) is a mixture of experts."""
        return self.moe is not None and (layer + 1) % self.moe_layer_frequency == 0

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return 0 if self.moe is None else self.num_layers // self.moe_layer_frequency

    @property
    def vocab_size(self) -> int:
        """Size of the joint vocabulary: text pieces, special tokens, image codes."""
        return self.text_vocab_size + NUM_SPECIAL_TOKENS + self.image_vocab_size

    @property
    def first_code_id(self) -> int:
        """Id of the first image code; all higher ids are codes too."""
        return self.text_vocab_size + NUM_SPECIAL_TOKENS

    @property
    def codebook_size(self) -> int:
        """Image codes of each codebook; the ids of the codebooks are consecutive."""
        return self.image_vocab_size // self.codes_per_place

    @property
    def code_mask_id(self) -> int:
        """Id of ``<code_mask>``, the token of a hidden image code."""
        return self._special("<code_mask>")

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token ``<pad>``."""
        return self._special("<pad>")

    @property
    def bos_token_id(self) -> int:
        """Id of ``<bos>``, the first token of a target."""
        return self._special("<bos>")

    @property
    def eos_token_id(self) -> int:
        """Id of ``<eos>``, the last token of a target."""
        return self._special("<eos>")

    @property
    def image_token_id(self) -> int:
        """Id of ``<image>``, the placeholder of a patch."""
        return self._special("<image>")

    def _special(self, token: str) -> int:
        return self.text_vocab_size + SPECIAL_TOKENS.index(token)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_largest(name: str, value: int, largest: int) -> None:
    if value > largest:
        raise UserError(f"{name} is {value}; expected at most {largest}")

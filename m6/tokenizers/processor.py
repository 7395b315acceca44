"""Converts images and texts to the model's inputs."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import to_pil_image

from m6.architecture.names import IGNORED_LABEL, IMAGE, SOURCE, TARGET, without_auto_map
from m6.errors import UserError, nearest
from m6.tokenizers.pictures import RESAMPLE, square_rgb
from m6.tokenizers.text import M6Tokenizer

_DEFAULTS = {"return_tensors": "pt", "padding": True, "truncation": False, "max_length": None}
_NESTED = ("common_kwargs", "text_kwargs", "images_kwargs")


class M6ImageProcessor(PilBackend):
    """Converts images to RGB, pads them with white to a square, resizes them (bicubic), and scales to [-1, 1].

    Images are PIL images or arrays of levels 0 to 255; with ``do_rescale=False`` arrays of floats in [0, 1].
    """

    size = {"height": 256, "width": 256}  # noqa: RUF012 - the base class declares it so
    resample = RESAMPLE
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    do_resize = True
    do_rescale = True
    do_normalize = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**without_auto_map(self, kwargs))

    def process_image(
        self, image: Any, *args: Any, input_data_format: Any = None, do_rescale: bool = True, **kwargs: Any
    ) -> np.ndarray:
        """Returns an image as uint8 ``[3, H, H]`` before resizing. Overrides a step of the base class."""
        levels = image if do_rescale else _levels(image)
        picture = levels if isinstance(levels, Image.Image) else to_pil_image(levels, None, None, input_data_format)
        return np.moveaxis(np.asarray(square_rgb(picture)), -1, 0)

    def _preprocess(  # type: ignore[override]  # the base class names all settings
        self, images: list[np.ndarray], *args: Any, **kwargs: Any
    ) -> BatchFeature:
        if not kwargs["do_rescale"]:  # process_image has turned the given floats into levels.
            kwargs |= {"do_rescale": True, "rescale_factor": 1 / 255}
        return super()._preprocess(images, *args, **kwargs)


def _levels(image: Any) -> np.ndarray:
    """The levels 0 to 255 of an image with values in [0, 1]."""
    values = np.asarray(image)
    if values.dtype.kind != "f" or not ((values >= 0) & (values <= 1)).all():
        raise UserError(
            f"do_rescale=False is for pictures of floats in [0, 1], found {values.dtype} from {values.min()} to "
            f"{values.max()}; leave it out for levels from 0 to 255"
        )
    return np.rint(255 * values).astype(np.uint8)


class M6Processor(ProcessorMixin):
    """Builds prompts for generation, or rows for training: ``[<image> x P]? source <bos> [prefix | target <eos>]``.

    Rows are padded on the left.

    Args:
        image_processor: image processor with the model's image_size.
        tokenizer: tokenizer of the joint vocabulary.
        num_patches: P, the number of placeholder tokens of an image.
    """

    def __init__(self, image_processor: M6ImageProcessor, tokenizer: M6Tokenizer, num_patches: int = 16) -> None:
        super().__init__(image_processor, tokenizer)
        self.num_patches = num_patches

    @property
    def model_input_names(self) -> list[str]:
        """The names of what a call without targets returns."""
        return [*super().model_input_names, "token_type_ids"]

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        target_prefix: str | Sequence[int] | None = None,
        *,
        targets: str | Sequence[str] | None = None,
        return_tensors: str | None = "pt",
        padding: bool | str = True,
        truncation: bool = False,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Builds the inputs of ``generate``; with ``targets`` those of ``forward``, for training.

        Args:
            images: an image, a list or an array [B, ...] of B images, or a list of B lists of at most one image. None
                or an empty list in a list: a prompt without an image.
            text: the source: a string or B strings. Special tokens in it are read as plain text.
            target_prefix: first tokens of every target after ``<bos>``: a text, or ids such as the id of ``<boi>``.
            targets: targets of training: a string or B strings. ``<bos>`` is put before and ``<eos>`` after each.
            return_tensors: "pt", "np", or None for lists.
            padding: True or "longest": to the longest prompt; "max_length": to ``max_length``; False: none.
            truncation: cuts sources to make every prompt fit into ``max_length``; needs ``max_length``.
            max_length: in tokens, image and target prefix included.
            kwargs: passed to the image processor. As in transformers, all arguments after ``targets`` may also come in
                the dictionaries ``text_kwargs``, ``images_kwargs`` and ``common_kwargs``.

        Returns:
            input_ids, attention_mask and token_type_ids (0 image, 1 source, 2 target; 0 at padding) of int64
            ``[B, S]``, and pixel_values of fp32 ``[N, 3, H, W]`` when there are N > 0 images. With targets also
            labels of int64 ``[B, S]``: the target and ``<eos>``, elsewhere -100.

        Raises:
            ValueError: neither images nor text is given, their numbers differ, the lengths do not fit, or an argument
                is unknown.
        """
        nested = {name: kwargs.pop(name) for name in _NESTED if name in kwargs}
        if nested:
            plain: dict[str, Any] = {"return_tensors": return_tensors, "padding": padding, "truncation": truncation}
            plain |= {"max_length": max_length, **kwargs}
            for name, given in nested.items():
                for twice in sorted(plain.keys() & given.keys()):
                    if twice not in _DEFAULTS or plain[twice] != _DEFAULTS[twice]:
                        raise ValueError(f"{twice} is given both by itself and in {name}")
            all_given = functools.reduce(operator.or_, nested.values(), plain)
            return self(images, text, target_prefix, targets=targets, **all_given)
        for name in kwargs:
            if name not in (valid := self.image_processor.valid_kwargs.__annotations__):
                own = ("return_tensors", "padding", "truncation", "max_length")
                raise ValueError(f"{name}: M6Processor knows no such argument{nearest(name, [*own, *valid])}")
        if text is None and images is None:
            raise ValueError("a prompt needs images or text")
        if truncation and max_length is None:
            raise ValueError("truncation needs a max_length")
        pictures = [_only(picture) for picture in _rows_of(images)]
        texts = [text] if isinstance(text, str) else list([""] * len(pictures) if text is None else text)
        if images is None:
            pictures *= len(texts)
        if not texts or not pictures:
            raise ValueError("images or text is an empty list")
        if len(texts) != len(pictures):
            raise ValueError(f"{len(pictures)} images do not match {len(texts)} texts")
        limit = max_length if truncation else None
        rows = [
            self._row(picture is not None, source, target, limit)
            for picture, source, target in zip(
                pictures, texts, self._targets(target_prefix, targets, len(texts)), strict=True
            )
        ]
        length = _padded_length([sum(map(len, row)) for row in rows], padding, max_length, return_tensors)
        data = self._padded(rows, length)
        if targets is None:
            del data["labels"]
        present = [picture for picture in pictures if picture is not None]
        if present:
            data["pixel_values"] = self.image_processor(present, return_tensors="np", **kwargs)["pixel_values"]
        return BatchFeature(data, tensor_type=return_tensors)

    def _targets(
        self, prefix: str | Sequence[int] | None, targets: str | Sequence[str] | None, number: int
    ) -> list[list[int]]:
        """The ids of each row from ``<bos>`` on."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if targets is None:
            ids = self.tokenizer.encode_ids(prefix) if isinstance(prefix, str) else prefix or ()
            return [[bos, *ids]] * number
        if prefix is not None:
            raise ValueError("target_prefix is for generation, targets are for training; give one of them")
        texts = [targets] if isinstance(targets, str) else targets
        if len(texts) != number:
            raise ValueError(f"{len(texts)} targets do not match {number} texts or images")
        return [[bos, *self.tokenizer.encode_ids(text), eos] for text in texts]

    def _row(self, has_picture: bool, source: str, target: list[int], limit: int | None) -> tuple[list[int], ...]:
        """The ids of image, source and target. The source is cut to fit all into ``limit``."""
        image = [self.tokenizer.image_token_id] * (self.num_patches if has_picture else 0)
        ids = self.tokenizer.encode_ids(source)
        if limit is not None:
            room = limit - len(image) - len(target)
            if room < 0:
                raise ValueError(f"max_length {limit} leaves no room for the picture and the target")
            ids = ids[:room]
        return image, ids, target

    def _padded(self, rows: Sequence[tuple[list[int], ...]], length: int | None) -> dict[str, Any]:
        """Rows padded to ``length`` tokens, as arrays. None: rows without padding, as lists."""
        columns: dict[str, Any] = {"input_ids": [], "attention_mask": [], "token_type_ids": [], "labels": []}
        for row in rows:
            ids = np.concatenate([np.array(part, np.int64) for part in row])
            types = np.repeat([IMAGE, SOURCE, TARGET], [len(part) for part in row])
            # Padding is on the left, so generated tokens follow the prompt directly.
            before = (0 if length is None else length - len(ids), 0)
            columns["input_ids"].append(np.pad(ids, before, constant_values=self.tokenizer.pad_token_id))
            columns["attention_mask"].append(np.pad(np.ones_like(ids), before))
            columns["token_type_ids"].append(np.pad(types.astype(np.int64), before))
            learned = (types == TARGET) & (ids != self.tokenizer.bos_token_id)
            columns["labels"].append(
                np.pad(np.where(learned, ids, IGNORED_LABEL), before, constant_values=IGNORED_LABEL)
            )
        if length is None:
            return {name: [row.tolist() for row in values] for name, values in columns.items()}
        return {name: np.stack(values) for name, values in columns.items()}

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: Any, processor_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        # The base class would look for these two in the Auto classes. They may not be registered there.
        return [
            M6ImageProcessor.from_pretrained(pretrained_model_name_or_path, **kwargs),
            M6Tokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs),
        ]


def _rows_of(images: Any) -> list[Any]:
    """One entry for each prompt."""
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4:
        return list(images)
    return [images]


def _only(images: Any) -> Any:
    """The image of a prompt."""
    if not isinstance(images, (list, tuple)):
        return images
    if len(images) > 1:
        raise ValueError(f"a prompt has at most one image, found {len(images)}")
    return images[0] if images else None


def _padded_length(
    lengths: Sequence[int], padding: bool | str, max_length: int | None, return_tensors: str | None
) -> int | None:
    """The padded length of prompts; None: no padding."""
    longest = max(lengths)
    if padding == "max_length":
        if max_length is None or longest > max_length:
            raise ValueError(f'padding "max_length" needs a max_length of at least {longest}, found {max_length}')
        return max_length
    if padding not in (True, False, "longest", "do_not_pad"):
        raise ValueError(f'padding {padding!r}: expected True, "longest", "max_length" or False')
    if padding in (True, "longest") or (return_tensors is not None and min(lengths) == longest):
        return longest
    if return_tensors is not None:
        raise ValueError(f"prompts of {min(lengths)} to {longest} tokens make no tensor; pass padding=True")
    return None

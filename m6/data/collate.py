"""Collation of examples into the tensors of a micro-batch: packing into rows, positions, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m6.architecture.names import IGNORED_LABEL, SOURCE, TARGET
from m6.data.objectives import Example
from m6.tokenizers.pictures import pixel_values
from m6.tokenizers.text import M6Tokenizer


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The tensors of one micro-batch: B rows of S tokens, and N images. Integer tensors are int64.

    A row can hold several samples. ``sample_ids`` numbers the samples of a row from 1 and is 0 at padding; attention
    stays within a sample.
    """

    input_ids: Tensor
    """[B, S], ``<pad>`` at padding"""
    token_type_ids: Tensor
    """[B, S]: 0 for images and padding, 1 for tokens with bidirectional attention (the source, and targets predicted
    in place), 2 for other targets including their ``<bos>``"""
    position_ids: Tensor
    """[B, S]: counted from 0 separately in the image, the source and the target of each sample"""
    sample_ids: Tensor
    """[B, S]"""
    labels: Tensor
    """[B, S], aligned with input_ids (the model shifts them); -100 except at target tokens after ``<bos>``. The label
    of a token predicted in place stands one position later"""
    objective_ids: Tensor
    """[B, S]: index in OBJECTIVES at labels, -1 elsewhere"""
    data_source_ids: Tensor
    """[B, S]: index of the sample's source in the run's sources at labels, -1 elsewhere"""
    pixel_values: Tensor
    """[N, 3, image_size, image_size] fp32 in [-1, 1], in the order of their placeholder tokens, row by row"""
    num_target_tokens: int
    """number of labels"""
    num_tokens: int
    """number of tokens without padding"""
    num_samples: int
    num_token_pairs: int
    """sum of the squared sample lengths; the cost of attention is proportional to it"""
    bad_rows: list[str] = field(default_factory=list)
    """``source:id: reason`` of each unusable row"""

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the micro-batch with its tensors on a device."""
        moved: dict[str, Any] = {name: t.to(device, non_blocking=True) for name, t in self.tensors().items()}
        return replace(self, **moved)

    def pin_memory(self) -> MicroBatch:
        """Returns the micro-batch with its tensors in pinned memory, so copies to a GPU overlap with computation."""
        pinned: dict[str, Any] = {name: t.pin_memory() for name, t in self.tensors().items()}
        return replace(self, **pinned)

    def model_inputs(self) -> dict[str, Tensor]:
        """Returns the arguments of the model's forward pass, without the labels."""
        names = ("input_ids", "token_type_ids", "position_ids", "sample_ids", "pixel_values")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensor fields by name."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs samples into rows by first-fit decreasing: at most 11/9 of the optimal number of rows, plus 1.

    Args:
        lengths: tokens of each sample, at most ``capacity``.
        capacity: tokens of a row.

    Returns:
        The sample indices of each row in increasing order; the rows are ordered by their first index.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    # The sort is stable, so the packing of equal lengths does not depend on the platform.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, space in enumerate(free) if space >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= lengths[index]
    return sorted(sorted(row) for row in rows)


def _hidden(example: Example) -> np.ndarray:
    """The indices of corrupted target ids."""
    corrupted = example.target_ids if example.corrupted_target_ids is None else example.corrupted_target_ids
    return np.flatnonzero(np.array(corrupted) != np.array(example.target_ids))


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Builds micro-batches with rows of ``sequence_length`` tokens.

    Attributes:
        tokenizer: gives the ids of the special tokens.
        sequence_length: tokens of a row, padding included.
        num_patches: placeholder tokens of an image.
        image_size: side of an image in pixels.
        packing: whether a row may hold several samples.
    """

    tokenizer: M6Tokenizer
    sequence_length: int
    num_patches: int
    image_size: int
    packing: bool = True

    def __call__(
        self, examples: Sequence[Example], pictures: Sequence[np.ndarray | None], bad_rows: Sequence[str] = ()
    ) -> MicroBatch:
        """Collates examples.

        Args:
            examples: the examples of one micro-batch. For an empty list the result is one row of padding.
            pictures: the decoded image of each example, uint8 [image_size, image_size, 3], or None.
            bad_rows: copied to the micro-batch.

        Raises:
            ValueError: an example is longer than a row.
        """
        tokenizer = self.tokenizer
        prefixes = [0 if picture is None else self.num_patches for picture in pictures]
        # + 2: <bos> before and <eos> after the target.
        lengths = [p + len(e.source_ids) + len(e.target_ids) + 2 for p, e in zip(prefixes, examples, strict=True)]
        if lengths and max(lengths) > self.sequence_length:
            raise ValueError(f"an example of {max(lengths)} tokens exceeds sequence_length {self.sequence_length}")
        rows = pack(lengths, self.sequence_length) if self.packing else [[index] for index in range(len(examples))]
        # At least one row, so that the model can run on an empty batch.
        shape = (max(1, len(rows)), self.sequence_length)
        input_ids = np.full(shape, tokenizer.pad_token_id, np.int64)
        token_type_ids, position_ids, sample_ids = (np.zeros(shape, np.int64) for _ in range(3))
        labels = np.full(shape, IGNORED_LABEL, np.int64)
        objective_ids, data_source_ids = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        counter = np.arange(self.sequence_length)
        for row, indices in enumerate(rows):
            begin = 0
            for number, index in enumerate(indices, start=1):
                example = examples[index]
                source = begin + prefixes[index]
                target = source + len(example.source_ids)
                end = target + len(example.target_ids) + 2
                labelled: slice | np.ndarray = slice(target + 1, end)
                input_ids[row, begin:source] = tokenizer.image_token_id
                input_ids[row, source:target] = example.source_ids
                input_ids[row, target] = tokenizer.bos_token_id
                input_ids[row, labelled] = [*example.target_ids, tokenizer.eos_token_id]
                token_type_ids[row, source:target] = SOURCE
                # The types define the prefix-LM mask: attention is bidirectional within the source type.
                token_type_ids[row, target:end] = SOURCE if example.in_place else TARGET
                # Image, source and target have separate positions, so a target begins at 0 for any prompt length.
                for first, last in ((begin, source), (source, target), (target, end)):
                    position_ids[row, first:last] = counter[: last - first]
                sample_ids[row, begin:end] = number
                if example.in_place:
                    hidden = _hidden(example)
                    # The model shifts labels by one, so a label one position later is predicted at the token's own
                    # position.
                    labelled = target + 2 + hidden
                    labels[row, labelled] = np.array(example.target_ids)[hidden]
                else:
                    labels[row, labelled] = input_ids[row, labelled]
                # After the labels are copied: the model reads corrupted ids and is trained on the true ones.
                if example.corrupted_target_ids is not None:
                    input_ids[row, target + 1 : end - 1] = example.corrupted_target_ids
                objective_ids[row, labelled] = example.objective_id
                data_source_ids[row, labelled] = example.data_source_id
                begin = end
        # The model assigns images to placeholders in the order of the packed rows, not of the examples.
        ordered = [pictures[index] for indices in rows for index in indices]
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            token_type_ids=torch.from_numpy(token_type_ids),
            position_ids=torch.from_numpy(position_ids),
            sample_ids=torch.from_numpy(sample_ids),
            labels=torch.from_numpy(labels),
            objective_ids=torch.from_numpy(objective_ids),
            data_source_ids=torch.from_numpy(data_source_ids),
            pixel_values=pixel_values([p for p in ordered if p is not None], self.image_size),
            num_target_tokens=int((labels != IGNORED_LABEL).sum()),
            num_tokens=sum(lengths),
            num_samples=len(examples),
            num_token_pairs=sum(length**2 for length in lengths),
            bad_rows=list(bad_rows),
        )

"""Sequence slices: the legal positions for cuts, and the keys and values passed from a slice to later ones.

After TeraPipe (arXiv 2102.07988) and Seq1F1B (arXiv 2406.03488). Their causal rows may be cut at any token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m6.architecture.names import TARGET
from moe.autograd import custom_gradient
from moe.parts import SequenceSlice, SequenceSlices


def valid_cuts(token_type_ids: Tensor, sample_ids: Tensor) -> list[int]:
    """The positions for cuts through all rows of a micro-batch: no earlier token attends to a later one.

    These are ``p for p in range(1, S) if not mask[:, :, :p, p:].any()`` of ``prefix_lm_mask``: positions inside of
    targets, between packed samples and in padding. Images and sources have none inside, since their attention is
    bidirectional.

    Args:
        token_type_ids, sample_ids: int64 [B, S], see ``MicroBatch``.

    Returns:
        the increasing positions; a cut at p makes slices of p and of S - p tokens.
    """
    length = token_type_ids.shape[1]
    index = torch.arange(length, device=token_type_ids.device)
    # The whole sample attends to all its tokens outside of the target, so each token attends at least to the last one.
    ahead = torch.where(token_type_ids != TARGET, index, -1)
    last = ahead.new_full((len(ahead), int(sample_ids.max()) + 1), -1).scatter_reduce(1, sample_ids, ahead, "amax")
    read = torch.where(sample_ids != 0, last.gather(1, sample_ids), -1)
    furthest = torch.maximum(read, index).amax(0).cummax(0).values
    return ((furthest[:-1] < index[1:]).nonzero().squeeze(-1) + 1).tolist()


def nearest_valid_cuts(legal: Sequence[int], length: int, slices: int) -> list[int]:
    """The legal positions nearest to the cuts of equal slices; fewer than ``slices - 1`` if some coincide.

    Args:
        legal: see ``valid_cuts``.
        length: tokens of a row.
    """
    if not legal:
        return []
    return sorted({min(legal, key=lambda place: abs(place * slices - number * length)) for number in range(1, slices)})


class SliceKeys:
    """Keys, values and routing choices of a micro-batch's slices in the layers of one stage, for later slices.

    Args:
        sample_ids: int64 [B, S] of whole rows, on the CPU.
    """

    def __init__(self, sample_ids: Tensor) -> None:
        self._length = sample_ids.shape[1]
        self._num_tokens, self._samples = int((sample_ids != 0).sum()), int(sample_ids.max())
        self._parts: dict[tuple[int, int], _Sequence] = {}
        self._routed: dict[int, SequenceSlices] = {}

    def of_slice(self, begin: int, end: int) -> SliceCache:
        """The ``past_key_values`` of all blocks for the slice of the tokens ``[begin, end)``."""
        return SliceCache(self, begin, end == self._length)

    def routed(self, layer_index: int) -> SequenceSlices:
        """The routing choices of a sparse layer for all slices."""
        return self._routed.setdefault(layer_index, SequenceSlices(self._num_tokens, self._samples))

    def join(self, part: int, layer_index: int, new: Tensor, begin: int) -> Tensor:
        """Appends keys (part 0) or values (part 1) of a slice to the earlier ones; see ``_Sequence``."""
        if (part, layer_index) not in self._parts:
            self._parts[part, layer_index] = _Sequence(new, self._length)
        return self._parts[part, layer_index].join(new, begin)


class SliceCache:
    """One slice's view of ``SliceKeys``, with the ``update`` of a transformers cache."""

    def __init__(self, keys: SliceKeys, begin: int, is_last: bool) -> None:
        self._keys, self._begin, self._is_last = keys, begin, is_last

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Adds this slice's keys and values [B, H, T, size]; returns all up to its end, [B, H, ..., size].

        A second call by activation checkpointing writes the same values again.
        """
        return (
            self._keys.join(0, layer_index, key, self._begin),
            self._keys.join(1, layer_index, value, self._begin),
        )

    def part(self, layer_index: int) -> SequenceSlice:
        """The position of this slice among all tokens of the rows, for a sparse layer."""
        return SequenceSlice(self._keys.routed(layer_index), self._begin, self._is_last)


class _Sequence:
    """The keys, or the values, of a layer for whole rows, and the sum of their gradients from slices.

    Slices share one tensor. For n equal slices, separate copies of all keys up to the end of each slice would take
    (n + 1) / 2 times its memory.

    Later slices read the part of a slice, but not through autograd. Their backward passes come first and add their
    gradients to the sequence, so the backward pass of the slice gets the whole sum.
    """

    def __init__(self, new: Tensor, length: int) -> None:
        self._values = new.new_empty(*new.shape[:2], length, new.shape[3])
        self._gradient: Tensor | None = None
        self._left = 0  # tokens without complete gradients

    def join(self, new: Tensor, begin: int) -> Tensor:
        """Writes [B, H, T, size] at ``begin``, and returns all up to the end of it, [B, H, begin + T, size]."""
        return custom_gradient(
            new, lambda new: self._extend(new, begin), lambda gradient: self._collect(gradient, begin)
        )

    def _extend(self, new: Tensor, begin: int) -> Tensor:
        end = begin + new.shape[2]
        self._left = max(self._left, end)
        # ``data``, since autograd refuses saved tensors after a write. Earlier slices do not read the new part.
        self._values.data[:, :, begin:end] = new
        return self._values.data[:, :, :end]

    def _collect(self, gradient: Tensor, begin: int) -> Tensor:
        """Adds a slice's gradients of its own and of earlier parts, and returns the gradient of its own part."""
        end = gradient.shape[2]
        assert end == self._left, "the backward pass of a slice came before that of the next one"
        if self._gradient is None:
            self._gradient = gradient.clone()
        else:
            self._gradient[:, :, :end] += gradient
        self._left = begin
        own = self._gradient[:, :, begin:end]
        if begin == 0:  # this was the last backward pass
            self._gradient = None
            self._values = self._values.new_empty(0)
        return own

"""The outputs of the models' forward passes, and the losses of targets.

A text token competes with the joint vocabulary, an image code with its own codebook. The places of image codes and
their codebooks are fixed, and generation chooses nothing else there (:mod:`m6.generation`). So a model need not learn
them, nor compute the scores of all other tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from m6.architecture.settings import ModelSettings
from moe import RoutingStats


@dataclass
class M6ModelOutput(ModelOutput):
    """Output of :class:`m6.model.modeling.M6Model`.

    Attributes:
        last_hidden_state: [B, S, hidden_size], after the final norm.
        hidden_states: with ``output_hidden_states`` the input of each block, then ``last_hidden_state``; else None.
            With sequence parallelism the inputs of blocks are this rank's parts.
        aux_loss: scalar fp32, the sum of the sparse layers' weighted router losses, each a mean over tokens; 0 for a
            dense model.
        aux_losses: fp32 [B], the same for each row: a mean over its tokens.
        router_stats: one entry per sparse layer, in the order of the forward pass.
        past_key_values: the cache, if one is used.
    """

    last_hidden_state: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    aux_losses: torch.Tensor | None = None
    router_stats: tuple[RoutingStats, ...] | None = None
    past_key_values: Cache | None = None


@dataclass
class M6Output(ModelOutput):
    """Output of :class:`m6.model.modeling.M6ForConditionalGeneration`.

    Attributes:
        loss: scalar, ``sum(weight * cross entropy) / num_items_in_batch``; None without labels. In training mode the
            router losses of each row are added, times its share of the items: see ``num_items_in_batch``.
        logits: [B, S, vocab_size], or [B, logits_to_keep, vocab_size]; None with ``return_logits=False``.
        target_losses: [N] unweighted cross entropy of each labelled target in row-major order, in nats, fp32
            (fp64 for a double-precision model); None without labels.
        hidden_states, aux_loss, router_stats, past_key_values: as in :class:`M6ModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    target_losses: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    router_stats: tuple[RoutingStats, ...] | None = None
    past_key_values: Cache | None = None


ROWS_IN_CACHE = 64  # rows of logits per cross entropy on a CPU


class Head:
    """The language-model head: its matrix is the token embedding, with all rows on this rank."""

    def rows(self, config: ModelSettings) -> int:
        """The number of rows of the matrix on this rank."""
        return config.vocab_size

    def logits(self, hidden_states: Tensor, table: Tensor, config: ModelSettings) -> Tensor:
        """Maps [..., D] to the logits of the joint vocabulary, [..., V]."""
        return F.linear(hidden_states, table)

    def losses(self, hidden_states: Tensor, table: Tensor, targets: Tensor, config: ModelSettings) -> Tensor:
        """Returns the loss of each target, [N] in at least fp32.

        Args:
            hidden_states: [N, D], the last hidden states before the targets.
            table: [rows, D], the matrix.
            targets: int64 [N], ids of the joint vocabulary.
        """

        def losses_of(rows: Tensor | slice, tokens: slice) -> Tensor:
            return _cross_entropy(F.linear(hidden_states[rows], table[tokens]), targets[rows] - tokens.start)

        return losses_by_codebook(targets, config, losses_of)


def losses_of_logits(logits: Tensor, targets: Tensor, config: ModelSettings) -> Tensor:
    """The same as ``Head.losses``, from the logits [N, V] of the whole joint vocabulary."""
    return losses_by_codebook(
        targets, config, lambda rows, tokens: _cross_entropy(logits[rows][:, tokens], targets[rows] - tokens.start)
    )


def losses_by_codebook(
    targets: Tensor, config: ModelSettings, losses_of: Callable[[Tensor | slice, slice], Tensor]
) -> Tensor:
    """Returns the loss of each target, [N]: texts compete with all tokens, an image code with its own codebook.

    Args:
        losses_of: (rows, tokens) -> the losses of these rows; only these tokens compete. Ranks of a tensor group have
            the same targets, so they call it alike.
    """
    first, size = config.first_code_id, max(1, config.codebook_size)
    books = (targets - first).div(size, rounding_mode="floor").clamp(min=-1)  # -1: text
    present: list[int] = books.unique().tolist()
    if not any(book >= 0 for book in present):
        return losses_of(slice(None), slice(0, config.vocab_size))
    places = [(books == book).nonzero().squeeze(1) for book in present]
    losses = []
    for book, rows in zip(present, places, strict=True):
        begin = 0 if book < 0 else first + book * size
        losses.append(losses_of(rows, slice(begin, config.vocab_size if book < 0 else begin + size)))
    return torch.cat(losses)[torch.cat(places).argsort()]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, [N], from logits [N, V] and int64 [N], in at least fp32.

    A sum over a large vocabulary loses too much in 16 bits. A CPU takes a few rows at a time, so they stay in its
    cache.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    rows = ROWS_IN_CACHE if logits.device.type == "cpu" else max(1, len(logits))
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    return torch.cat([F.cross_entropy(piece.to(precise), own, reduction="none") for piece, own in pieces])


def log_sums(logits: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row, [N], as precise as ``_cross_entropy``."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    rows = ROWS_IN_CACHE if logits.device.type == "cpu" else max(1, len(logits))
    return torch.cat([piece.to(precise).logsumexp(1) for piece in logits.split(rows)])

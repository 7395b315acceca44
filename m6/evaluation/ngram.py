"""n-gram language models over token ids, a baseline for the loss of a neural model on the same targets.

Interpolated modified Kneser-Ney smoothing: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language
Modeling" (Harvard TR-10-98, 1998), the section on modified Kneser-Ney. Let h be a context of m - 1 tokens, and h' the
same context without its first token. Then

    p_m(w | h) = max(a(hw) - D_m(a(hw)), 0) / sum_v a(hv)  +  gamma(h) * p_(m-1)(w | h'),    p_0 = 1 / V
    gamma(h)   = (D_m(1) N1(h) + D_m(2) N2(h) + D_m(3) N3+(h)) / sum_v a(hv)
    D_m(k)     = k - (k + 1) * Y * n_(k+1) / n_k  for k = 1, 2, 3;   Y = n_1 / (n_1 + 2 n_2);   D_m(0) = 0

N_c(h) is the number of tokens v with a(hv) = c (N3+: 3 or more, with one common discount). n_c is the number of m-grams
with a = c. The adjusted count a is the number of occurrences at the highest order. At lower orders it is the number of
different tokens before the m-gram (Kneser and Ney 1995). An m-gram at the beginning of a sequence has no predecessor
and keeps its number of occurrences. In an unseen context, p_m = p_(m-1). Order 1 is thus absolute discounting against
the uniform distribution, and no probability is 0.

m-grams are counted by sorting integer keys. The key of an m-gram combines its last token with the number of its first
m - 1 tokens among the (m-1)-grams. It fits into 64 bits at every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# D(1), D(2), D(3) for tiny data with too few counts to estimate them.
_FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


class NGramCounts:
    """The m-grams of training sequences, for models of several orders.

    Args:
        sequences: token ids, each ``[bos, ..., eos]``. All begin with the same token. This token occurs nowhere else
            and is never predicted.
        order: the longest m-grams to count. It is reduced to the longest sequence's length.
        vocab_size: V, the number of ids.

    Raises:
        ValueError: there is nothing to predict, or the ids break the rules above.
    """

    def __init__(self, sequences: Sequence[Sequence[int] | Ints], order: int, vocab_size: int) -> None:
        if order < 1:
            raise ValueError(f"order is {order}; at least 1 is needed")
        tokens, self.position = _join(sequences, vocab_size)
        self.vocab_size, self.bos = vocab_size, int(tokens[0])
        if np.any((tokens == self.bos) != (self.position == 0)) or not np.any(self.position):
            raise ValueError(f"expected sequences of two tokens or more in which {self.bos} occurs only at the start")
        self.by_order: list[_Counts] = []
        context = np.zeros(len(tokens), np.int64)  # order 1 has one context, the empty one with number 0
        for m in range(1, min(order, int(self.position.max()) + 1) + 1):
            self.by_order.append(_count(context * vocab_size + tokens, self.position >= m - 1))
            context = _contexts(self.by_order[-1].number)


class NGramModel:
    """An interpolated modified Kneser-Ney model.

    Args:
        counts: counts of the training sequences. The model's probabilities sum to 1 over their vocabulary.
        order: n; a token is predicted from the n - 1 tokens before it. It is reduced to the order of the counts.
    """

    def __init__(self, counts: NGramCounts, order: int) -> None:
        self.vocab_size, self._bos = counts.vocab_size, counts.bos
        self.order = order = min(order, len(counts.by_order))
        counted, position = counts.by_order, counts.position
        self._orders: list[_Order] = []
        for m, this in enumerate(counted[:order], start=1):
            num_contexts = 1 if m == 1 else len(counted[m - 2].keys)
            if m == order:
                adjusted = this.occurrences
            else:
                # Each different (m+1)-gram adds one predecessor to the m-gram at its end.
                suffixes = this.number[counted[m].example]
                predecessors = np.bincount(suffixes, minlength=len(this.keys))
                adjusted = np.where(position[this.example] == m - 1, this.occurrences, predecessors)
            if m == 1:  # <bos> is never predicted, so it gets no probability
                adjusted = np.where(this.keys == self._bos, 0, adjusted)
            self._orders.append(_smooth(this.keys, adjusted, num_contexts, self.vocab_size))

    def log_probabilities(self, sequences: Sequence[Sequence[int] | Ints]) -> Floats:
        """Returns the log probability in nats of every token after ``bos``, given the tokens before it.

        Args:
            sequences: in the format of the training sequences.

        Returns:
            [sum of (length - 1)], in the order of the tokens.
        """
        tokens, position = _join(sequences, self.vocab_size)
        if np.any(tokens[position == 0] != self._bos):
            raise ValueError(f"every sequence must begin with {self._bos}")
        # Interpolation from p_0 upwards: each order scales the probability by gamma(h) and adds its discounted share.
        probability = np.full(len(tokens), 1.0 / self.vocab_size)
        context = np.zeros(len(tokens), np.int64)
        for m, order in enumerate(self._orders, start=1):
            has_context = (position >= m - 1) & (context >= 0)
            key = context * self.vocab_size + tokens
            index = np.minimum(np.searchsorted(order.keys, key), len(order.keys) - 1)
            is_seen = has_context & (order.keys[index] == key)
            probability[has_context] *= order.backoff[context[has_context]]
            probability[is_seen] += order.share[index[is_seen]]
            context = _contexts(np.where(is_seen, index, -1))
        return np.log(probability[position > 0])

    def mean_loss(self, sequences: Sequence[Sequence[int] | Ints]) -> float:
        """Returns the mean negative log probability in nats of the tokens after ``bos``."""
        return float(-self.log_probabilities(sequences).mean())


@dataclass(frozen=True)
class _Counts:
    """The G different m-grams of T training tokens. The number of an m-gram is its index in ``keys``.

    Attributes:
        keys: [G] sorted; number of the context * V + last token.
        occurrences: [G] number of occurrences.
        example: [G] index of one token at the end of the m-gram.
        number: [T] number of the m-gram ending at each token; -1 at the first m - 1 tokens of a sequence.
    """

    keys: Ints
    occurrences: Ints
    example: Ints
    number: Ints


@dataclass(frozen=True)
class _Order:
    """The smoothed m-grams of one order.

    Attributes:
        keys: [G] as in _Counts.
        share: [G] (a - D(a)) / sum of a over the context.
        backoff: gamma of each context.
    """

    keys: Ints
    share: Floats
    backoff: Floats


def _join(sequences: Sequence[Sequence[int] | Ints], vocab_size: int) -> tuple[Ints, Ints]:
    """Concatenates the sequences. Returns all tokens, and the position of each token in its sequence."""
    if not sequences:
        raise ValueError("there are no sequences")
    arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
    tokens = np.concatenate(arrays)
    if not all(map(len, arrays)):
        raise ValueError("a sequence is empty")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"ids from {tokens.min()} to {tokens.max()} do not fit vocab_size {vocab_size}")
    lengths = np.array([len(array) for array in arrays])
    return tokens, np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _contexts(number: Ints) -> Ints:
    """Returns the m-gram before each token, given the m-gram ending at each token. The first entry is not used."""
    return np.concatenate([[-1], number[:-1]])


def _count(keys: Ints, complete: NDArray[np.bool_]) -> _Counts:
    """Counts the m-grams with the given keys; ``complete`` marks tokens at the end of an m-gram."""
    where = np.flatnonzero(complete)
    unique, inverse, occurrences = np.unique(keys[where], return_inverse=True, return_counts=True)
    number = np.full(len(keys), -1, np.int64)
    number[where] = inverse
    # Any example will do. NumPy's return_index gives the first one, and makes sorting several times slower.
    example = np.empty(len(unique), np.int64)
    example[inverse] = where
    return _Counts(unique, occurrences, example, number)


def _smooth(keys: Ints, adjusted: Ints, num_contexts: int, vocab_size: int) -> _Order:
    context = keys // vocab_size
    discount = _discounts(adjusted)[np.minimum(adjusted, 3)]
    total = np.bincount(context, weights=adjusted, minlength=num_contexts)
    removed = np.bincount(context, weights=discount, minlength=num_contexts)
    # A context only at the end of sequences has no continuation: all probability comes from lower orders.
    backoff = np.divide(removed, total, out=np.ones(num_contexts), where=total > 0)
    return _Order(keys, (adjusted - discount) / total[context], backoff)


def _discounts(adjusted: Ints) -> Floats:
    """Returns D(0) = 0, D(1), D(2), D(3), estimated from the counts of counts."""
    n = np.bincount(np.minimum(adjusted, 5), minlength=6).astype(np.float64)
    estimated = list(_FALLBACK_DISCOUNTS)
    if n[1:5].all():
        y = n[1] / (n[1] + 2 * n[2])
        for k in (1, 2, 3):
            value = k - (k + 1) * y * n[k + 1] / n[k]
            if value > 0:  # a discount of 0 or less would leave no probability for unseen tokens
                estimated[k - 1] = value
    return np.array([0.0, *estimated])

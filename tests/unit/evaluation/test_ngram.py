"""The n-gram baselines against a slow reference made of dictionaries."""

import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from m6.evaluation.ngram import NGramCounts, NGramModel

BOS, EOS = 7, 8
VOCAB = 10  # 0..5 occur, 6 and 9 never do


def fit(sequences, order: int) -> NGramModel:
    return NGramModel(NGramCounts(sequences, order, VOCAB), order)


class Reference:
    """The equations of Chen and Goodman (1998) written down one token and one context at a time."""

    def __init__(self, sequences, order):
        self.order = order
        self.adjusted = []
        for m in range(1, order + 1):
            occurrences, predecessors = Counter(), defaultdict(set)
            for sequence in sequences:
                for end in range(m, len(sequence) + 1):
                    gram = tuple(sequence[end - m : end])
                    occurrences[gram] += 1
                    if end > m:
                        predecessors[gram].add(sequence[end - m - 1])
            highest = m == order
            counts = {g: c if highest or g[0] == BOS else len(predecessors[g]) for g, c in occurrences.items()}
            if m == 1:
                del counts[BOS,]
            self.adjusted.append(counts)
        self.discounts = [self.estimate(counts) for counts in self.adjusted]

    @staticmethod
    def estimate(counts):
        n = Counter(counts.values())
        discounts = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
        if all(n[c] for c in (1, 2, 3, 4)):
            y = n[1] / (n[1] + 2 * n[2])
            for k in (1, 2, 3):
                value = k - (k + 1) * y * n[k + 1] / n[k]
                if value > 0:
                    discounts[k] = value
        return discounts

    def probability(self, word, history, m=None):
        if m is None:
            m = min(self.order, len(history) + 1)
        if m == 0:
            return 1 / VOCAB
        context = tuple(history[len(history) - (m - 1) :])
        counts, discounts = self.adjusted[m - 1], self.discounts[m - 1]
        followers = {v: counts[(*context, v)] for v in range(VOCAB) if (*context, v) in counts}
        lower = self.probability(word, history, m - 1)
        if not followers:
            return lower
        total = sum(followers.values())
        gamma = sum(discounts[min(c, 3)] for c in followers.values()) / total
        count = followers.get(word, 0)
        return (count - discounts[min(count, 3)]) / total + gamma * lower


def make_sequences(num, seed, longest=12):
    """Tokens whose frequencies differ and which depend on the token before."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(num):
        tokens = [rng.randrange(6)]
        for _ in range(rng.randrange(longest)):
            tokens.append((tokens[-1] + min(rng.randrange(6), rng.randrange(6))) % 6)
        sequences.append([BOS, *tokens, EOS])
    return sequences


# 2 sequences fall back on fixed discounts, 20 mix both, 200 estimate every order.
@pytest.mark.parametrize("num", [2, 20, 200])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_reference(num, order):
    train, held_out = make_sequences(num, seed=num), make_sequences(15, seed=1000)
    held_out += [[BOS, 9, 0, 1, 6, 6, 2, EOS], [BOS, EOS]]  # ids that were never seen, and an empty target
    model, reference = fit(train, order), Reference(train, order)
    expected = [math.log(reference.probability(s[i], s[:i])) for s in held_out for i in range(1, len(s))]
    # Both are float64 and differ in the order of a few sums.
    np.testing.assert_allclose(model.log_probabilities(held_out), expected, rtol=0, atol=1e-12)
    assert model.mean_loss(held_out) == pytest.approx(-np.mean(expected), abs=1e-12)


def test_discounts_are_estimated_on_enough_data():
    """Guards the test above: it must not compare fallback with fallback alone."""
    reference = Reference(make_sequences(200, seed=200), 5)
    assert sum(list(d.values()) != [0.0, 0.5, 1.0, 1.5] for d in reference.discounts) >= 3


@pytest.mark.parametrize("order", [1, 2, 5])
def test_probabilities_sum_to_one_in_seen_and_unseen_contexts(order):
    model = fit(make_sequences(50, seed=3), order)
    contexts = [[BOS], [BOS, 0], [BOS, 9], [BOS, 9, 9, 9, 9, 9], [BOS, EOS, EOS, 1]]
    contexts += [[BOS, *c] for c in itertools.product(range(6), repeat=3)]
    for context in contexts:
        last = [model.log_probabilities([[*context, word]])[-1] for word in range(VOCAB)]
        assert np.isfinite(last).all()
        assert np.exp(last).sum() == pytest.approx(1.0, abs=1e-12)


def test_unigram_by_hand():
    # 0 twice, 1 once, eos twice: n_3 = n_4 = 0, so the discounts are 0.5, 1, 1.5; gamma = (1 + 0.5 + 1) / 5.
    model = fit([[BOS, 0, 0, EOS], [BOS, 1, EOS]], 1)
    uniform = 0.5 / VOCAB
    expected = [(2 - 1) / 5 + uniform, (1 - 0.5) / 5 + uniform, uniform, (2 - 1) / 5 + uniform]
    np.testing.assert_allclose(np.exp(model.log_probabilities([[BOS, 0, 1, 2, EOS]])), expected, rtol=1e-12)


def test_longer_contexts_help_on_text_that_repeats():
    train = make_sequences(300, seed=5, longest=40)
    held_out = make_sequences(50, seed=6, longest=40)
    losses = [fit(train, order).mean_loss(held_out) for order in (1, 2)]
    assert losses[1] < losses[0] - 0.05


def test_order_is_bounded_by_the_longest_sequence():
    sequences = [[BOS, 1, EOS], [BOS, EOS]]
    assert fit(sequences, 5).mean_loss(sequences) == fit(sequences, 3).mean_loss(sequences)


def test_arrays_and_lists_are_the_same():
    sequences = make_sequences(10, seed=2)
    arrays = [np.array(sequence) for sequence in sequences]
    assert fit(arrays, 3).mean_loss(sequences) == fit(sequences, 3).mean_loss(arrays)


@pytest.mark.parametrize(
    ("sequences", "order", "message"),
    [
        ([], 2, "no sequences"),
        ([[BOS, 1], []], 2, "empty"),
        ([[BOS, 10]], 2, "vocab_size 10"),
        ([[BOS, 1, BOS, 2]], 2, "7 occurs only at the start"),
        ([[BOS, 1], [3, 1]], 2, "7 occurs only at the start"),
        ([[BOS], [BOS]], 2, "two tokens or more"),
        ([[BOS, 1]], 0, "order is 0"),
    ],
)
def test_refuses(sequences, order, message):
    with pytest.raises(ValueError, match=message):
        NGramCounts(sequences, order, VOCAB)

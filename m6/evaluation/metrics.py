"""Scores of downstream tasks with their confidence intervals, and baselines without the model."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.data.objectives import MATCH, NO_MATCH, Example, context_ids
from m6.evaluation.ngram import NGramCounts, NGramModel
from m6.generation.likelihood import label_log_likelihoods, target_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.pictures import decode_picture
from m6.tokenizers.processor import M6Processor
from m6.tokenizers.text import M6Tokenizer

RESAMPLES = 300


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval.

    Attributes:
        value: the value on all test rows.
        low, high: bounds of the interval; None for a single row, and for exact values.
        is_share: whether the value is a share of the rows, printed in percent.
    """

    value: float
    low: float | None = None
    high: float | None = None
    is_share: bool = False

    def __str__(self) -> str:
        form = "{:.1%}" if self.is_share else "{:.2f}"
        value = form.format(self.value)
        if self.low is None or self.high is None:
            return value
        return f"{value} ({form.format(self.low)} to {form.format(self.high)})"


def share(hits: Sequence[bool] | NDArray[np.bool_]) -> Estimate:
    """Returns the share of hits with Wilson's score interval (JASA 22, 1927), accurate even near 0 and 1."""
    from scipy.stats import binomtest

    interval = binomtest(int(np.sum(hits)), len(hits)).proportion_ci(method="wilson")
    return Estimate(float(np.mean(hits)), float(interval.low), float(interval.high), is_share=True)


def bootstrap(num_rows: int, statistic: Callable[[NDArray[np.int64]], float]) -> Estimate:
    """Returns a statistic of the rows with the percentile interval of RESAMPLES random draws with replacement.

    Args:
        num_rows: number of test rows.
        statistic: maps the indices of rows to a value.
    """
    from scipy.stats import bootstrap as resample

    index = np.arange(num_rows)
    if num_rows < 2:
        return Estimate(float(statistic(index)))
    drawn = resample(
        (index,), statistic, vectorized=False, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(float(statistic(index)), float(drawn.low), float(drawn.high))


def chrf(written: Sequence[str], references: Sequence[str]) -> float:
    """Returns chrF (Popovic, WMT 2015) of N captions against one reference each, from 0 to 100."""
    import sacrebleu

    return sacrebleu.corpus_chrf(written, [references]).score


def bleu(written: Sequence[str], references: Sequence[str]) -> float:
    """Returns BLEU-4 (Papineni et al., ACL 2002) over characters of N captions against one reference each, to 100."""
    import sacrebleu

    return sacrebleu.corpus_bleu(written, [references], tokenize="zh").score


def most_frequent(texts: Sequence[str]) -> str:
    """Returns the most frequent caption or label; the first one if several are equally frequent."""
    return collections.Counter(texts).most_common(1)[0][0]


# Candidates for C, the inverse regularisation of the logistic regression. The validation split selects one, to make the
# baseline strong.
_STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class LabelledTexts:
    """N texts and their labels."""

    texts: list[str]
    labels: list[str]


def macro_f1(predicted: NDArray[np.str_], labels: NDArray[np.str_]) -> float:
    """Returns F1 of N predicted labels against the N true ones, averaged over the labels."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, average="macro", zero_division=0.0))


def predict_by_likelihood(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    texts: Sequence[str],
    labels: Sequence[str],
    max_tokens: int,
    pictures: Sequence[np.ndarray] | None = None,
    contexts: Sequence[str | None] | None = None,
) -> list[str]:
    """Returns for each text the label with the highest log p(label, <eos> | image, text).

    Args:
        model: fine-tuned on the objective text_classification or visual_question_answering, in evaluation mode.
        processor: processor of the model.
        texts: N texts or questions.
        labels: the candidates.
        max_tokens: longest text in training, in tokens; longer texts are cut.
        pictures: N images, uint8 [image_size, image_size, 3], or None.
        contexts: the context of each text, see ``m6.objectives.text_classification.with_context``, or None.
    """
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(text, max_tokens) for text in texts]
    for source, context in zip(sources, contexts or [None] * len(sources), strict=True):
        source += context_ids(context, max_tokens - len(source), tokenizer)
    scores = label_log_likelihoods(model, processor, sources, labels, pictures)
    return [labels[index] for index in scores.argmax(dim=1).tolist()]


def predict_by_word_counts(training: LabelledTexts, validation: LabelledTexts, texts: Sequence[str]) -> list[str]:
    """Predicts labels by logistic regression on TF-IDF of character n-grams, n from 1 to 3.

    The regularisation is selected by the accuracy on the validation split; without its rows C is 1.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    def fit(strength: float) -> Any:
        vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), sublinear_tf=True, max_features=100_000)
        classifier = make_pipeline(vectorizer, LogisticRegression(C=strength, max_iter=1000))
        return classifier.fit(training.texts, training.labels)

    if validation.texts:
        best = max(map(fit, _STRENGTHS), key=lambda fitted: fitted.score(validation.texts, validation.labels))
    else:
        best = fit(1.0)
    return [str(label) for label in best.predict(texts)]


ORDERS = {"5-gram model of the training texts": 5, "unigram model of the training texts": 1}


def nats_by_model(model: M6ForConditionalGeneration, processor: M6Processor, examples: Sequence[Example]) -> np.ndarray:
    """Returns -log p(rest, <eos> | first half) [N] in nats.

    Args:
        model: fine-tuned on the objective text_continuation, in evaluation mode.
        processor: processor of the model.
        examples: N examples of the objective.
    """
    return -target_log_likelihoods(model, processor, examples, [None] * len(examples)).numpy()


def nats_by_ngrams(
    training: Sequence[Sequence[int]], examples: Sequence[Example], tokenizer: M6Tokenizer, vocab_size: int
) -> dict[str, np.ndarray]:
    """Returns -log p(rest, <eos> | first half) [N] in nats under n-gram models of whole texts.

    Args:
        training: token ids of the training texts.
        examples: N examples.
        tokenizer: gives the ids of ``<bos>`` and ``<eos>``.
        vocab_size: vocabulary size of the model, so that losses are comparable.
    """
    begin, end = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    counts = NGramCounts([[*begin, *ids, *end] for ids in training], max(ORDERS.values()), vocab_size)
    texts = [[*begin, *example.source_ids, *example.target_ids, *end] for example in examples]
    nats = {}
    for name, order in ORDERS.items():
        log_probabilities = NGramModel(counts, order).log_probabilities(texts)
        by_text = np.split(log_probabilities, np.cumsum([len(text) - 1 for text in texts])[:-1])
        rests = [own[len(e.source_ids) :] for own, e in zip(by_text, examples, strict=True)]
        nats[name] = np.array([-rest.sum() for rest in rests])
    return nats


def line_length(text: str) -> int | None:
    """Returns the common length of all lines of a verse, in characters; None if lengths differ or there is no line.

    A heading 《title》author does not count.
    """
    text = re.sub(r"^《[^\n]*\n", "", text)
    lengths = {len(line) for line in re.split(r"[，。？！；、\s]+", text) if line}
    return lengths.pop() if len(lengths) == 1 else None


SIDE = 16  # pixels; distances at a low resolution depend on layout and colour rather than on detail
AT_ONCE = 4096  # training images compared with all queries at a time


def nearest_pictures(queries: Sequence[bytes], training: Iterable[bytes]) -> NDArray[np.int64]:
    """Returns for each query the index of the nearest training image, by squared distance at SIDE x SIDE pixels.

    Args:
        queries: N image files (PNG, JPEG or WebP).
        training: at least one image file; up to ``AT_ONCE`` are in memory.

    Returns:
        [N]; the first index if several are equally near.
    """
    query_pixels, remaining = _pixels(queries), iter(training)
    nearest, least = np.zeros(len(queries), np.int64), np.full(len(queries), np.inf)
    first = 0
    while part := list(itertools.islice(remaining, AT_ONCE)):
        pixels = _pixels(part)
        # |q - t|^2 = |q|^2 - 2 q t + |t|^2; |q|^2 is the same for all t.
        distances = (pixels**2).sum(axis=1) - 2 * query_pixels @ pixels.T
        nearer = distances.min(axis=1) < least
        nearest[nearer] = first + distances.argmin(axis=1)[nearer]
        least = np.minimum(least, distances.min(axis=1))
        first += len(part)
    return nearest


def _pixels(pictures: Sequence[bytes]) -> NDArray[np.float64]:
    # Centred at 0, to reduce cancellation in the difference above.
    return np.stack([decode_picture(picture, SIDE).reshape(-1) for picture in pictures]) / 127.5 - 1


RANKS = (1, 5, 10)


def found_at(scores: NDArray[np.float64], relevant: NDArray[np.bool_], k: int) -> NDArray[np.bool_]:
    """Returns for each query whether a relevant candidate is among the k highest scores, bool [Q].

    Recall@k is the share of these queries.

    Args:
        scores: [Q, C] for Q queries and C candidates. Ties count against the relevant candidates, so constant scores
            find nothing.
        relevant: [Q, C], with at least one relevant candidate per row.
        k: at least 1.
    """
    # The best relevant candidate alone decides.
    best_relevant = np.where(relevant, scores, -np.inf).max(axis=1, keepdims=True)
    ahead = ((scores >= best_relevant) & ~relevant).sum(axis=1)
    return ahead < k


def chance(relevant: NDArray[np.bool_], k: int) -> float:
    """Returns the expected recall@k of a random order.

    It is the mean of 1 - C(n - r, k) / C(n, k) over the queries [Q, n], with r relevant ones among n candidates.
    """
    n = relevant.shape[1]
    k = min(k, n)
    return float(np.mean([1 - math.comb(n - int(r), k) / math.comb(n, k) for r in relevant.sum(axis=1)]))


def match_pairs(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    max_tokens: int,
) -> NDArray[np.float64]:
    """Returns log p(match) - log p(no match) of N images with their captions, [N].

    Args:
        model: fine-tuned on the objective image_text_matching, in evaluation mode.
        processor: processor of the model.
        pictures: N images, uint8 [image_size, image_size, 3].
        captions: N texts.
        max_tokens: longest text in training, in tokens; longer texts are cut.
    """
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(caption, max_tokens) for caption in captions]
    scores = label_log_likelihoods(model, processor, sources, (MATCH, NO_MATCH), pictures)
    # The difference cancels the model's overall likelihood of any answer for a pair.
    return (scores[:, 0] - scores[:, 1]).numpy()


def match_by_model(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    max_tokens: int,
) -> NDArray[np.float64]:
    """Returns the scores of ``match_pairs`` for every pair of N images and M captions, [N, M]."""
    # One image at a time: the examples of all pairs would not fit into memory.
    return np.stack(
        [match_pairs(model, processor, [picture] * len(captions), captions, max_tokens) for picture in pictures]
    )


def match_by_neighbour(neighbour_captions: Sequence[str], captions: Sequence[str]) -> NDArray[np.float64]:
    """Returns the chrF similarity of M captions to N captions of nearest training images, [N, M]."""
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    return np.array([[chrf.sentence_score(c, [neighbour]).score for c in captions] for neighbour in neighbour_captions])

"""Classification of texts and answers to questions by the likelihood of the labels, and a TF-IDF baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.data.objectives import context_ids
from m6.generation.labelling import label_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor

# Candidates for C, the inverse regularisation of the logistic regression. The validation split selects one, so that
# the baseline is as strong as possible.
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
    """Returns for each text the label with the highest log p(label, <eos> | picture, text).

    Args:
        model: fine-tuned on the objective text_classification or visual_question_answering, in evaluation mode.
        processor: processor of the model.
        texts: N texts or questions.
        labels: the candidates.
        max_tokens: length to which training cuts a text.
        pictures: N pictures, uint8 [image_size, image_size, 3], or None.
        contexts: what follows each text, as ``m6.objectives.text_classification.with_context`` says, or None.
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

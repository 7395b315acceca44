"""The rest of a text: how likely it is, and whether verse keeps its form."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from m6.data.objectives import Example
from m6.evaluation.ngram import NGramCounts, NGramModel
from m6.generation.likelihood import target_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor
from m6.tokenizers.text import M6Tokenizer

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
    """Returns the same under n-gram models of whole texts, which read the first half before the rest.

    Args:
        training: token ids of the training texts.
        examples: N examples.
        tokenizer: gives the ids of ``<bos>`` and ``<eos>``.
        vocab_size: that of the model, so that both choose among the same tokens.
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
    """Returns the length that all lines of a verse share, in characters; None if they differ or there is none.

    A heading 《title》author does not count.
    """
    text = re.sub(r"^《[^\n]*\n", "", text)
    lengths = {len(line) for line in re.split(r"[，。？！；、\s]+", text) if line}
    return lengths.pop() if len(lengths) == 1 else None

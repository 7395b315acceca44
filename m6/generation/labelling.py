"""Which of given labels a model writes for a text, with or without a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from m6.data.objectives import Example
from m6.generation.likelihood import target_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor


def label_log_likelihoods(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    sources: Sequence[Sequence[int]],
    labels: Sequence[str],
    pictures: Sequence[np.ndarray] | None = None,
) -> Tensor:
    """Returns log p(label, <eos> | picture, source) of N sources and L labels.

    Args:
        model: fine-tuned on text_classification, or with pictures on visual_question_answering or image_text_matching,
            whose labels are ``MATCH`` and ``NO_MATCH``; in evaluation mode.
        processor: processor of the model.
        sources: the token ids of N texts.
        labels: L candidates.
        pictures: N pictures, uint8 [image_size, image_size, 3], or None.

    Returns:
        fp64 [N, L] on the CPU, in nats.
    """
    targets = [processor.tokenizer.encode_ids(label) for label in labels]
    examples = [Example(source_ids=list(source), target_ids=target) for source in sources for target in targets]
    shown = [None] * len(sources) if pictures is None else pictures
    repeated = [picture for picture in shown for _ in labels]
    return target_log_likelihoods(model, processor, examples, repeated).view(len(sources), len(labels))
